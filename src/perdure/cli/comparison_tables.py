"""The main metrics of a comparison as tables for a terminal; files hold all of them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from perdure.cli.tables import table
from perdure.report.comparison import DIVIDER, Comparison
from perdure.report.comparison_text import NOTE, table_rows, table_sections
from perdure.report.selection import ROW_TITLES, Selection
from perdure.report.table_style import TableStyle, main_names


def comparison_tables(
    comparison: Comparison, style: TableStyle | None = None
) -> Iterator[Table]:  # fmt: skip
    """Yield one table per inference mode, and one of the costs."""
    for title, mode in table_sections(comparison):
        shown = main_names(comparison, mode)
        header, rows = table_rows(comparison, mode, shown, differences=("ACC",), style=style)
        if rows:
            yield _table(title, header, rows)


def selection_table(selection: Selection) -> Table:
    """Return the table of the validation scores of all settings."""
    return _table("settings on validation rows", ROW_TITLES, selection.rows())


def print_notes(console: Console, comparison: Comparison) -> None:
    """Print what the numbers of the tables mean, and what the methods have in common."""
    for note in (NOTE, *comparison.notes):
        console.print(note, markup=False, highlight=False)


def _table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    filled = table(title, header)
    for row in rows:
        if row[0] == DIVIDER:
            filled.add_section()
        filled.add_row(*row)
    return filled
