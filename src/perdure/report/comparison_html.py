"""The comparison tables of the page and of a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perdure.core.notebook import html_table
from perdure.core.registry import require
from perdure.report.comparison import Cell, Comparison, Measure
from perdure.report.comparison_text import (
    CSV_TITLES,
    TableStyle,
    csv_rows,
    format_value,
    main_names,
    table_rows,
    table_sections,
)
from perdure.report.figure_data import LEVEL, quantity_of
from perdure.report.figure_html import Content, Html, el, table
from perdure.report.records import Runs

if TYPE_CHECKING:
    from perdure.report.comparison import Comparison


# ------------------------------------------------------------------------------------------------
# The comparison tables of the page: means over seeds, and differences from the reference.
# ------------------------------------------------------------------------------------------------

_NONE = "\u2013"
_DIFFERENCES = ("ACC", "FGT", "learned", "worst_drop", "AF", "Avg", "F")
"""Metrics whose differences are shown; FT follows from AF, and BWT from FGT."""


def table_note(runs: Runs) -> str:
    """Return the sentence that explains the numbers of the tables."""
    about = quantity_of(runs).about
    if max(len(group) for group in runs.groups.values()) == 1:
        return f"One seed, so no spread and no interval is given. {about}"
    return (
        f"Mean and, below it, one sample standard deviation (divided by n-1) over n seeds. {about}"
    )


def values_table(comparison: Comparison, mode: str | None) -> Html:
    """Return the table of all metrics of a mode, or of all costs if `mode` is None."""
    return _table(comparison, comparison.measures_of(mode))


def by_task_table(comparison: Comparison, mode: str) -> list[Html]:
    """Return the table of forgetting after each task; empty with fewer than three tasks."""
    measures = comparison.measures_by_task(mode)
    about = "Forgetting of the earlier tasks after each task (F_t), whose mean is F."
    return [el("p", about, class_="note"), _table(comparison, measures)] if measures[1:] else []


def _table(comparison: Comparison, measures: list[Measure]) -> Html:
    rows = [
        [label, str(comparison.seed_count(label, measures)), *_values(comparison, label, measures)]
        for label in comparison.labels
        if comparison.seed_count(label, measures)
    ]
    titles = ["method", "n", *(measure.title for measure in measures)]
    return table(titles, comparison.set_apart(rows))


def differences_table(comparison: Comparison, mode: str) -> list[Html]:
    """Return the table of paired differences and their intervals; empty for a single method."""
    measures = [measure for measure in comparison.measures_of(mode) if measure.name in _DIFFERENCES]
    others = [
        label
        for label in comparison.labels
        if any((cell := comparison.cell(label, m.key)) and cell.difference for m in measures)
    ]
    if not others:
        return []
    rows = [[label, *(_gap(comparison.cell(label, m.key)) for m in measures)] for label in others]
    about = (
        f"Difference from {comparison.reference}, seed by seed, and the {LEVEL:.0%} interval of "
        "Student's t (a single seed has none). Bold: the interval does not contain zero."
    )
    return [
        el("p", about, class_="note"),
        table(["method", *(m.name for m in measures)], comparison.set_apart(rows)),
    ]


def _values(comparison: Comparison, label: str, measures: list[Measure]) -> list[Content]:
    return [_value(measure, comparison.cell(label, measure.key)) for measure in measures]


def _value(measure: Measure, cell: Cell | None) -> Content:
    if cell is None:
        return _NONE
    mean = format_value(measure, cell.summary.mean)
    if cell.summary.std is None or (measure.unit == "bytes" and cell.summary.std == 0):
        return mean  # equal in every run
    return [mean, el("small", f"\u00b1 {format_value(measure, cell.summary.std)}")]


def _gap(cell: Cell | None) -> Content:
    if cell is None or cell.difference is None:
        return _NONE
    gap = cell.difference
    if gap.low is None or gap.high is None:
        return f"{gap.mean:+.3f}"
    shown = el("strong" if gap.excludes_zero else "span", f"{gap.mean:+.3f}")
    return [shown, el("small", f"{gap.low:+.3f} to {gap.high:+.3f}")]


# ------------------------------------------------------------------------------------------------
# A comparison in a notebook: one line, tables as HTML, and a data frame.
# ------------------------------------------------------------------------------------------------


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
