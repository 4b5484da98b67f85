"""Recipes: bundled configs that are ready to run, each with a header.

The first line of a recipe is the command that runs it, the second line its header:

    # perdure run fot-permuted-mnist
    # paper: FOT | table: Table 1 | size: paper | minutes: 70
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from perdure.core.errors import UserError, bad_value

SIZES = ("small", "paper")
RECIPES_DIR = Path(__file__).resolve().parent
_KEYS = ("paper", "table", "size", "minutes")


@dataclass(frozen=True)
class Recipe:
    """A bundled config and its header."""

    path: Path
    command: str
    """The command that runs it."""
    paper: str
    """The paper that it follows, or `-`."""
    table: str
    """The table or figure of that paper, or `-`."""
    size: str
    """`small`: takes minutes on a laptop. `paper`: has the scale of the paper."""
    minutes: float
    """Approximate duration on two cores."""

    @property
    def name(self) -> str:
        """The name by which commands and `perdure.run` find the recipe."""
        return self.path.stem


def list_recipes() -> list[Recipe]:
    """Return all recipes, small ones first, then by name."""
    recipes = [read_recipe(recipe_path(name)) for name in recipe_names()]
    return sorted(recipes, key=lambda recipe: SIZES.index(recipe.size))


def recipe_names() -> list[str]:
    """Return the names of all recipes, sorted."""
    return sorted(path.stem for path in RECIPES_DIR.glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the file of a recipe.

    Raises:
        UserError: No recipe has this name.

    """
    if name not in recipe_names():
        raise UserError(f"no recipe is named {name!r}{_suggestion(name)}; see perdure recipes")
    return RECIPES_DIR / f"{name}.yaml"


def find_config(config: str | Path) -> Path:
    """Return the file that `config` names: a YAML file, or else the recipe of that name.

    Raises:
        UserError: Neither a file nor a recipe has this name.

    Example:
        >>> find_config("permuted-digits").name
        'permuted-digits.yaml'
    """
    path = Path(config)
    if path.is_file():
        return path
    if str(path) in recipe_names():
        return recipe_path(path.name)
    if path.exists():
        return path
    raise UserError(f"{path}: no such config file{_no_recipe(path)}")


def _no_recipe(path: Path) -> str:
    """Explain that `path` is no recipe either, if it could be meant as the name of one."""
    if path.suffix or path.parent != Path():
        return ""
    return f" or recipe{_suggestion(path.name)}; perdure recipes lists all recipes"


def _suggestion(name: str) -> str:
    similar = get_close_matches(name, recipe_names(), n=1)
    return f" (did you mean {similar[0]}?)" if similar else ""


def read_recipe(path: Path) -> Recipe:
    """Return the command and the header of one recipe.

    Raises:
        UserError: The header is malformed.

    """
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = [line.lstrip("# ").strip() for line in lines if line[:1] == "#"]
    command, header, *_ = [*comments, "", ""]
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
        form = " | ".join(f"{key}: ..." for key in _KEYS)
        raise bad_value(f"{path}: second line", text, f"# {form}")
    return values
