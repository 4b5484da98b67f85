"""perdure recipes: list the bundled configs, or print one."""

from __future__ import annotations

import sys
from dataclasses import asdict
from itertools import pairwise
from typing import Annotated, Any

import typer

from perdure.cli.console import print_json, stdout_console, table
from perdure.cli.options import Json
from perdure.config import read_yaml
from perdure.recipes import Recipe, list_recipes, read_recipe, recipe_path

_WRAPPED = ("data", "settings", "table")


def recipes(
    name: Annotated[str | None, typer.Argument(help="Print the config of this recipe.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes, which are configs that are ready to run, or print one of them.

    `perdure run NAME` runs a recipe. `perdure recipes NAME > my.yaml` makes a copy to edit. The
    minutes are those of two cores.
    """
    if name is not None:
        _print_recipe(name, as_json)
    elif as_json:
        print_json([_row(recipe) for recipe in list_recipes()])
    else:
        _print_list()


def _print_recipe(name: str, as_json: bool) -> None:
    path = recipe_path(name)
    if as_json:
        print_json(_row(read_recipe(path)) | {"config": read_yaml(path)})
    else:
        sys.stdout.write(path.read_text(encoding="utf-8"))


def _print_list() -> None:
    columns = ["name", "paper", "size", "minutes", "data", "settings", "table"]
    listing = table("", columns)
    for column in listing.columns:
        column.justify = "right" if column.header == "minutes" else "left"
        column.no_wrap = column.header not in _WRAPPED
        column.overflow = "fold"
    for recipe in list_recipes():
        listing.add_row(
            recipe.name, recipe.paper, recipe.size, f"{recipe.minutes:g}",
            ", ".join(_sources(recipe)), " ".join(_settings(recipe)), _short(recipe.table),
        )  # fmt: skip
    stdout_console().print(listing)
    stdout_console().print("run one with: perdure run NAME --set KEY=VALUE (its settings)")
    stdout_console().print("where the data comes from: perdure data list")


def _sources(recipe: Recipe) -> list[str]:
    """Return the names of the data that a recipe uses, of all its domains."""
    values = read_yaml(recipe.path)
    domains = values.get("stream", {}).get("domains") or [values.get("data", {})]
    return [domain.get("source", "digits") for domain in domains]


def _settings(recipe: Recipe) -> list[str]:
    """Return the settings of a recipe's command, which name files that the user has to provide."""
    words = recipe.command.split()
    return [word for option, word in pairwise(words) if option == "--set"]


def _short(citations: str) -> str:
    """Return `Table 1, Table 3, Figure 2` as `Table 1, 3; Figure 2`."""
    numbers: dict[str, list[str]] = {}
    for citation in citations.split(", "):
        kind, _, number = citation.partition(" ")
        numbers.setdefault(kind, []).append(number)
    return "; ".join(f"{kind} {', '.join(of_kind)}".strip() for kind, of_kind in numbers.items())


def _row(recipe: Recipe) -> dict[str, Any]:
    values = asdict(recipe)
    del values["path"]
    return {"name": recipe.name, **values, "data": _sources(recipe)}
