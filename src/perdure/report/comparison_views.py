"""A comparison in a notebook: one line, tables as HTML, and a data frame."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.core.notebook import html_table
from perdure.core.optional import require
from perdure.report.comparison_text import CSV_TITLES, csv_rows, table_rows, table_sections
from perdure.report.table_style import TableStyle, main_names

if TYPE_CHECKING:
    from perdure.report.comparison import Comparison


def comparison_line(comparison: Comparison) -> str:
    """Return what is compared, in one line."""
    labels = comparison.labels
    counts = [comparison.seed_count(label, comparison.measures) for label in labels]
    shown = ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
    return f"{shown}; {max(counts, default=0)} seeds"


def comparison_html(comparison: Comparison, style: TableStyle | None = None) -> str:
    """Return one table per inference mode and one of the costs, with main or chosen measures."""
    tables = []
    for title, mode in table_sections(comparison):
        shown = main_names(comparison, mode)
        head, rows = table_rows(comparison, mode, shown=shown, style=style)
        if rows:
            tables.append(html_table(title, head, rows))
    return "".join(tables)


def comparison_frame(comparison: Comparison) -> Any:
    """Return a data frame with one row per method and measure, as in table.csv."""
    pandas = require("pandas", "to_frame", "notebook")
    return pandas.DataFrame(csv_rows(comparison), columns=CSV_TITLES)
