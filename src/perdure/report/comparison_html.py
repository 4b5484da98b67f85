"""The comparison table on the page: means over seeds, and differences against the first method."""

from __future__ import annotations

from perdure.report.comparison import Cell, Comparison, Measure
from perdure.report.comparison_text import format_value
from perdure.report.figure_html import table
from perdure.report.markup import Content, Html, el
from perdure.report.run_records import Runs
from perdure.report.statistics import LEVEL

_SHARES = "Accuracies and their differences are shares from 0 to 1."
_NONE = "\u2013"
_DIFFERENCES = ("ACC", "FGT", "AF", "Avg", "F")
"""The rest follows: FT from AF, BWT from FGT; a table of all would be too wide to read."""


def table_note(runs: Runs) -> str:
    """What the numbers of the tables are."""
    if max(len(group) for group in runs.groups.values()) == 1:
        return f"One seed, so no spread and no interval is given. {_SHARES}"
    return (
        "Mean and, below it, one sample standard deviation (divided by n-1) over n seeds. "
        f"{_SHARES}"
    )


def values_table(comparison: Comparison, mode: str | None) -> Html:
    """Every metric of a mode (None: every cost), one method a row."""
    measures = comparison.measures_of(mode)
    rows = [
        [label, str(_count(comparison, label, measures)), *_each(comparison, label, measures)]
        for label in comparison.labels
        if _count(comparison, label, measures)
    ]
    return table(["method", "n", *(measure.title for measure in measures)], rows)


def differences_table(comparison: Comparison, mode: str) -> list[Html]:
    """Paired differences with their intervals; nothing where there is one method."""
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
        "Student's t (with one seed there is none). Bold: the interval leaves zero out."
    )
    return [el("p", about, class_="note"), table(["method", *(m.name for m in measures)], rows)]


def _each(comparison: Comparison, label: str, measures: list[Measure]) -> list[Content]:
    return [_value(measure, comparison.cell(label, measure.key)) for measure in measures]


def _value(measure: Measure, cell: Cell | None) -> Content:
    if cell is None:
        return _NONE
    mean = format_value(measure, cell.summary.mean)
    if cell.summary.std is None or (measure.unit == "bytes" and cell.summary.std == 0):
        return mean  # the same bytes in every run need no spread
    return [mean, el("small", f"\u00b1 {format_value(measure, cell.summary.std)}")]


def _gap(cell: Cell | None) -> Content:
    if cell is None or cell.difference is None:
        return _NONE
    gap = cell.difference
    if gap.low is None or gap.high is None:
        return f"{gap.mean:+.3f}"
    shown = el("strong" if gap.excludes_zero else "span", f"{gap.mean:+.3f}")
    return [shown, el("small", f"{gap.low:+.3f} to {gap.high:+.3f}")]


def _count(comparison: Comparison, label: str, measures: list[Measure]) -> int:
    cells = (comparison.cell(label, measure.key) for measure in measures)
    return max((cell.summary.count for cell in cells if cell), default=0)
