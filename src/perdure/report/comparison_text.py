"""Comparison tables as CSV and Markdown: which measures, in which order and unit."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from perdure.core.errors import bad_value
from perdure.core.text import argument, csv_text, printable
from perdure.evaluation.forgetting import DEFINITIONS
from perdure.report.comparison import COSTS, Comparison, Measure, ScoreMeasure
from perdure.report.figure_data import LEVEL, Difference, Summary

# ------------------------------------------------------------------------------------------------
# Which measures a table shows, in which order and in which unit.
# ------------------------------------------------------------------------------------------------

MAIN_METRICS = ("ACC", "FGT", "learned", "Avg")
"""Metrics that short tables show, beside those of `evaluate.metrics`."""
MAIN_COSTS = ("sent up", "sent down", "up per client", "kept per client", "seconds", "memory")
"""Costs that short tables show."""


@dataclass(frozen=True)
class TableStyle:
    """Which measures the tables of a comparison show, and in which unit."""

    metrics: tuple[str, ...] = ()
    """Names of metrics and costs, in their order. If empty, each table has a default."""
    percent: bool = False
    """Whether shares are shown as percentages."""

    def choose(self, measures: Sequence[Measure], default: Sequence[str] = ()) -> list[Measure]:
        """Return the measures to show."""
        names = self.metrics or tuple(default)
        if not names:
            return list(measures)
        shown = [measure for measure in measures if measure.name in names]
        return sorted(shown, key=lambda measure: names.index(measure.name))


def main_names(comparison: Comparison, mode: str | None) -> tuple[str, ...]:
    """Return the names of the measures that short tables show of an inference mode, or of costs."""
    if mode is None:
        return MAIN_COSTS
    scores = [m.metric for m in comparison.measures if isinstance(m, ScoreMeasure)]
    return (*MAIN_METRICS, *dict.fromkeys(scores))


def read_metrics(text: str) -> tuple[str, ...]:
    """Read names separated by commas, such as `ACC,FGT`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def check_metrics(metrics: Sequence[str], measured: Iterable[str]) -> None:
    """Refuse names that no table has, before anything is run."""
    scores = [name for metric in measured for name in (metric, f"{metric} FGT")]
    known = [*DEFINITIONS, *scores, *(cost.name for cost in COSTS)]
    unknown = next((name for name in metrics if name not in known), None)
    if unknown is not None:
        raise bad_value(argument("metrics"), unknown, f"one of {', '.join(known)}")


# ------------------------------------------------------------------------------------------------
# Comparison tables as CSV and Markdown, and the formatting of their numbers.
# ------------------------------------------------------------------------------------------------

NOTE = (
    "Mean ± sample standard deviation (divided by n-1) over n seeds. Differences are from "
    f"the first method, paired by seed, with the {LEVEL:.0%} interval of Student's t; a single "
    "seed has no interval."
)
DIFFERENCES = ("ACC", "FGT")
"""Metrics whose differences are shown by default; CSV and JSON have all."""

CSV_TITLES = [
    "method", "mode", "measure", "unit", "n", "mean", "std", "difference", "low", "high", "pairs",
    "definition",
]  # fmt: skip


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit, in steps of 1000.

    Example:
        >>> format_bytes(2_500_000)
        '2.5 MB'
    """
    divisor, unit = byte_unit(count)
    return f"{count / divisor:.0f} B" if unit == "B" else f"{count / divisor:.1f} {unit}"


def byte_unit(largest: float) -> tuple[float, str]:
    """Return the divisor and the name of the unit that suits numbers up to `largest` bytes."""
    units = ("B", "kB", "MB", "GB", "TB")
    step = 0
    while step < len(units) - 1 and largest >= 1000 ** (step + 1):
        step += 1
    return 1000.0**step, units[step]


def format_value(measure: Measure, value: float, percent: bool = False) -> str:
    """Return a value of a measure as text; shares have three decimals, percentages one."""
    if measure.unit == "bytes":
        return format_bytes(value)
    if measure.unit == "share":
        return f"{100 * value:.1f}" if percent else f"{value:.3f}"
    return f"{value:.1f}" if measure.unit == "s" else f"{value:.0f}"


def measure_title(measure: Measure, percent: bool = False) -> str:
    """Return the title of a measure's column."""
    return f"{measure.title} (%)" if percent and measure.unit == "share" else measure.title


def format_summary(measure: Measure, summary: Summary, percent: bool = False) -> str:
    """Return mean ± std as text, or the mean alone if there is no spread."""
    mean = format_value(measure, summary.mean, percent)
    if summary.std is None or (measure.unit == "bytes" and summary.std == 0):
        return mean
    return f"{mean} ± {format_value(measure, summary.std, percent)}"


def format_difference(difference: Difference, percent: bool = False) -> str:
    """Return a difference with its sign and, if it has one, its interval."""
    ends = [difference.mean, difference.low, difference.high]
    mean, *interval = (
        f"{100 * value:+.1f}" if percent else f"{value:+.3f}" for value in ends if value is not None
    )
    return f"{mean} [{', '.join(interval)}]" if len(interval) == 2 else mean


def table_rows(
    comparison: Comparison,
    mode: str | None,
    shown: Sequence[str] = (),
    differences: Sequence[str] = DIFFERENCES,
    style: TableStyle | None = None,
) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of a table, as text."""
    style = style or TableStyle()
    measures = style.choose(comparison.measures_of(mode), shown)
    several = mode is not None and len(comparison.labels) > 1
    compared = [m for m in measures if several and m.name in differences]
    return _rows(comparison, measures, compared, style.percent)


def rows_by_task(
    comparison: Comparison, mode: str, percent: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table of forgetting after each task, as text."""
    return _rows(comparison, comparison.measures_by_task(mode), [], percent)


def _rows(
    comparison: Comparison,
    measures: Sequence[Measure],
    compared: Sequence[Measure],
    percent: bool,
) -> tuple[list[str], list[list[str]]]:
    gaps = [f"{measure.name} against {comparison.reference}" for measure in compared]
    titles = (measure_title(measure, percent) for measure in measures)
    header = ["method", "n", *titles, *gaps]
    rows = []
    for label in comparison.labels:
        count = comparison.seed_count(label, measures)
        if count:
            values = [_spread(comparison, label, measure, percent) for measure in measures]
            against = [_gap(comparison, label, measure, percent) for measure in compared]
            rows.append([label, str(count), *values, *against])
    return header, comparison.set_apart(rows)


def all_tables(
    comparison: Comparison, style: TableStyle | None = None
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the title, the header and the rows of every table, with all or the chosen measures."""
    style = style or TableStyle()
    for title, mode in table_sections(comparison):
        header, rows = table_rows(comparison, mode, style=style)
        if rows:
            yield title, header, rows
        by_task = comparison.measures_by_task(mode) if mode is not None else []
        if mode is not None and len(by_task) > 1 and not style.metrics:
            about = f"{title}: forgetting after each task"
            yield about, *rows_by_task(comparison, mode, style.percent)


def table_sections(comparison: Comparison) -> list[tuple[str, str | None]]:
    """Return the title and the mode of each table; modes with equal numbers share a table."""
    titles: dict[str, list[str]] = {}
    for mode in comparison.modes:
        twin = next((other for other in titles if _alike(comparison, mode, other)), mode)
        titles.setdefault(twin, []).append(mode)
    tables: list[tuple[str, str | None]] = [(", ".join(n), mode) for mode, n in titles.items()]
    return [*tables, ("cost", None)]


def to_csv(comparison: Comparison) -> str:
    """Return CSV with one line per method and measure, with all digits.

    A label that a spreadsheet would take for a formula gets a leading '.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_TITLES)
    for row in csv_rows(comparison):
        writer.writerow([csv_text(cell) if isinstance(cell, str) else cell for cell in row])
    return text.getvalue()


def csv_rows(comparison: Comparison) -> list[list[object]]:
    """Return the rows below `CSV_TITLES`: one per method and measure."""
    return [
        _csv_row(comparison, label, measure)
        for label in comparison.labels
        for measure in comparison.measures
    ]


def to_markdown(comparison: Comparison, style: TableStyle | None = None) -> str:
    """Return one Markdown table per inference mode and one of the costs, with the definitions."""
    parts = [f"{NOTE} The first method is {comparison.reference}.", *comparison.notes]
    for title, header, rows in all_tables(comparison, style):
        parts.append(f"### {title}")
        parts.append("\n".join(_markdown_lines(header, rows)))
    parts.append(
        "\n".join(f"- {name}: {meaning}" for name, meaning in _meanings(comparison, style).items())
    )
    return printable("\n\n".join(parts)) + "\n"


def _alike(comparison: Comparison, mode: str, other: str) -> bool:
    def values(mode: str) -> list[tuple[str, str, dict[int, float]]]:
        return [
            (label, measure.name, cell.by_seed)
            for label in comparison.labels
            for measure in comparison.measures_of(mode)
            if (cell := comparison.cell(label, measure.key))
        ]

    return values(mode) == values(other)


def _spread(comparison: Comparison, label: str, measure: Measure, percent: bool) -> str:
    cell = comparison.cell(label, measure.key)
    return format_summary(measure, cell.summary, percent) if cell else "-"


def _gap(comparison: Comparison, label: str, measure: Measure, percent: bool) -> str:
    cell = comparison.cell(label, measure.key)
    return format_difference(cell.difference, percent) if cell and cell.difference else "-"


def _csv_row(comparison: Comparison, label: str, measure: Measure) -> list[object]:
    cell = comparison.cell(label, measure.key)
    begin: list[object] = [label, measure.mode or "", measure.name, measure.unit]
    if cell is None:
        return [*begin, 0, *[None] * 6, measure.meaning]
    gaps = cell.difference
    values = [gaps.mean, gaps.low, gaps.high, gaps.count] if gaps else [None] * 4
    return [
        *begin,
        cell.summary.count,
        cell.summary.mean,
        cell.summary.std,
        *values,
        measure.meaning,
    ]


def _markdown_lines(header: list[str], rows: list[list[str]]) -> Iterable[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|---|{'---:|' * (len(header) - 1)}"
    for row in rows:
        yield f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |"


def _meanings(comparison: Comparison, style: TableStyle | None) -> dict[str, str]:
    shown = (style or TableStyle()).choose([m for m in comparison.measures if m.task is None])
    return {measure.name: measure.meaning for measure in shown}
