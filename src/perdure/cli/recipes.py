"""perdure recipes: configs that are ready to run."""

from __future__ import annotations

from perdure import recipes as library
from perdure.cli.console import stdout_console
from perdure.cli.tables import table


def recipes() -> None:
    """List the recipes with paper, table, size, minutes on two cores, and command."""
    shown = table("", ["recipe", "paper", "table", "size", "minutes", "command"])
    for column in shown.columns:
        column.justify = "right" if column.header == "minutes" else "left"
        column.no_wrap = column.header not in ("table", "command")
        column.overflow = "fold"
    for recipe in library.recipes():
        minutes = f"{recipe.minutes:g}"
        shown.add_row(
            recipe.path.stem, recipe.paper, recipe.table, recipe.size, minutes, recipe.command
        )
    stdout_console().print(shown)
