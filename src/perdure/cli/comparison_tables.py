"""The comparison table on a terminal: the headline metrics; files hold the rest."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from perdure.cli.tables import table
from perdure.report.comparison import Comparison
from perdure.report.comparison_text import table_rows, table_sections

_SHOWN = ("ACC", "FGT", "AF", "Avg")


def comparison_tables(comparison: Comparison) -> Iterator[Table]:
    """A table for each mode of inference, and one of the costs."""
    for title, mode in table_sections(comparison):
        shown = _SHOWN if mode else ()
        yield _table(title, *table_rows(comparison, mode, shown=shown, differences=("ACC",)))


def _table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    made = table(title, header)
    for row in rows:
        made.add_row(*row)
    return made
