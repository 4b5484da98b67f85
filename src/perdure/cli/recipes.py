"""perdure recipes: configs that are ready to run."""

from __future__ import annotations

from pathlib import Path

from perdure.cli.messages import results
from perdure.cli.tables import table
from perdure.errors import UserError

_BESIDE_THE_SOURCE = Path(__file__).resolve().parents[3] / "recipes"


def recipes() -> None:
    """List the recipes, each with the command that runs it."""
    shown = table("", ["recipe", "command"])
    shown.columns[1].justify = "left"
    for path in sorted(folder().glob("*.yaml")):
        shown.add_row(path.stem, first_comment(path))
    results().print(shown)


def folder() -> Path:
    """Where the recipes are: below the working folder, or in the repository of this package."""
    for path in (Path("recipes"), _BESIDE_THE_SOURCE):
        if any(path.glob("*.yaml")):
            return path
    raise UserError("recipes: no folder recipes/ here; they come with perdure's repository")


def first_comment(path: Path) -> str:
    """The first comment line of a recipe, which is the command that runs it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("#")), "")
