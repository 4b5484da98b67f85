"""Recipes: configs that are ready to run, each with a header that says what it is.

The first line of a recipe is the command that runs it, the second line its header:

    # perdure run recipes/fot-permuted-mnist.yaml --set data.path=mnist.npz
    # paper: FOT | table: Table 1 | size: paper | minutes: 70
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import UserError, bad_value

SIZES = ("small", "paper")
_KEYS = ("paper", "table", "size", "minutes")
_BESIDE_THE_SOURCE = Path(__file__).resolve().parents[2] / "recipes"


@dataclass(frozen=True)
class Recipe:
    """A config and its header."""

    path: Path
    command: str
    """The command that runs it."""
    paper: str
    """The paper that it follows, or `-`."""
    table: str
    """The table or figure of that paper, or `-`."""
    size: str
    """small: ends within minutes on a laptop; paper: the paper's own scale."""
    minutes: float
    """About how long it takes on two cores."""


def folder() -> Path:
    """Where the recipes are: below the working folder, or in the repository of this package."""
    for path in (Path("recipes"), _BESIDE_THE_SOURCE):
        if any(path.glob("*.yaml")):
            return path
    raise UserError("recipes: no folder recipes/ here; they come with perdure's repository")


def recipes() -> list[Recipe]:
    """All recipes, the small ones first."""
    found = [read_recipe(path) for path in sorted(folder().glob("*.yaml"))]
    return sorted(found, key=lambda recipe: SIZES.index(recipe.size))


def read_recipe(path: Path) -> Recipe:
    """The command and the header of one recipe."""
    lines = path.read_text(encoding="utf-8").splitlines()
    command, header, *_ = [
        *(line.lstrip("# ").strip() for line in lines if line[:1] == "#"),
        "",
        "",
    ]
    values = _header(path, header)
    if values["size"] not in SIZES:
        raise bad_value(f"{path}: size", values["size"], " or ".join(SIZES))
    try:
        minutes = float(values["minutes"])
    except ValueError:
        raise bad_value(f"{path}: minutes", values["minutes"], "a number") from None
    return Recipe(path, command, values["paper"], values["table"], values["size"], minutes)


def _header(path: Path, text: str) -> dict[str, str]:
    pairs = (part.partition(":") for part in text.split("|"))
    values = {key.strip(): value.strip() for key, _, value in pairs}
    if tuple(values) != _KEYS:
        allowed = " | ".join(f"{key}: ..." for key in _KEYS)
        raise bad_value(f"{path}: second line", text, f"# {allowed}")
    return values
