"""Tables of a comparison: which measures they show, and their cells, which all writers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perdure.core.errors import bad_value
from perdure.core.text import argument
from perdure.evaluation.forgetting import DEFINITIONS
from perdure.report.comparison import (
    COSTS,
    DIVIDER,
    Better,
    Cell,
    Comparison,
    Measure,
    ScoreMeasure,
)
from perdure.report.figure_data import LEVEL, Summary

# ---- Which measures a table shows, in which order and in which unit

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


# ---- Numbers as text

NOTE = (
    "Mean ± sample standard deviation (divided by n-1) over n seeds. Differences are from "
    f"the first method, paired by seed, with the {LEVEL:.0%} interval of Student's t; a single "
    "seed has no interval."
)
DIFFERENCES = ("ACC", "FGT")
"""Metrics whose differences are shown by default; CSV and JSON have all."""


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


def format_summary(measure: Measure, summary: Summary, percent: bool = False) -> str:
    """Return mean ± std as text, or the mean alone if there is no spread."""
    mean = format_value(measure, summary.mean, percent)
    if summary.std is None or (measure.unit == "bytes" and summary.std == 0):
        return mean
    return f"{mean} ± {format_value(measure, summary.std, percent)}"


# ---- A table: its columns, and a row of cells for each method


Mark = Literal["", "best", "second", "sure", "missing"]
"""What is special about a cell: the rank among methods, a difference whose interval does not
contain zero, or that there is no value."""


@dataclass(frozen=True)
class TableCell:
    """One cell of a table."""

    text: str
    """The value as text."""
    value: float | None = None
    """The value; None if there is none."""
    spread: tuple[str, ...] = ()
    """The deviation of the value, or both ends of the interval of a difference."""
    mark: Mark = ""
    """What is special about the cell."""

    @property
    def plain(self) -> str:
        """The value with its spread, as text."""
        if len(self.spread) == 2:
            return f"{self.text} [{', '.join(self.spread)}]"
        return " ± ".join((self.text, *self.spread))


MISSING = TableCell("-", mark="missing")


@dataclass(frozen=True)
class TableRow:
    """The cells of one method."""

    label: str
    """Name of the method."""
    count: int
    """Number of seeds."""
    cells: tuple[TableCell, ...]
    """One cell per column."""
    is_reference: bool
    """Whether it is a reference, which stands apart and is not ranked."""


@dataclass(frozen=True)
class Column:
    """The head of a column."""

    title: str
    """Name of the measure."""
    better: Better = None
    """Which values are better; None if that is not known, or of differences."""


@dataclass(frozen=True)
class Table:
    """A table with a row per method and a column per measure."""

    title: str
    """Heading."""
    columns: tuple[Column, ...]
    """Heads of the columns after those of the methods and the numbers of seeds."""
    rows: tuple[TableRow, ...]
    """Methods, and below them the references."""

    @property
    def divided_at(self) -> int | None:
        """Position of the first reference; None if no method stands above it."""
        return next((i for i, row in enumerate(self.rows) if row.is_reference), 0) or None

    def texts(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and the rows as text, with a row that divides methods and references."""
        heads = ["method", "n", *(column.title for column in self.columns)]
        rows = [
            [row.label, str(row.count), *(cell.plain for cell in row.cells)] for row in self.rows
        ]
        if self.divided_at is not None:
            rows.insert(self.divided_at, [DIVIDER, *[""] * (len(heads) - 1)])
        return heads, rows


def mode_table(
    comparison: Comparison,
    mode: str | None,
    shown: Sequence[str] = (),
    differences: Sequence[str] = DIFFERENCES,
    style: TableStyle | None = None,
    title: str = "",
) -> Table:
    """Return the table of an inference mode or, if `mode` is None, of the costs.

    Args:
        comparison: What is shown.
        mode: The inference mode.
        shown: Names of the measures that are shown by default. If empty, all.
        differences: Names of the metrics whose differences are shown.
        style: Which measures are shown, and in which unit.
        title: Heading.

    """
    style = style or TableStyle()
    measures = style.choose(comparison.measures_of(mode), shown)
    several = mode is not None and len(comparison.labels) > 1
    compared = [m for m in measures if several and m.name in differences]
    return measures_table(comparison, measures, compared, style.percent, title)


def measures_table(
    comparison: Comparison,
    measures: Sequence[Measure],
    compared: Sequence[Measure] = (),
    percent: bool = False,
    title: str = "",
) -> Table:
    """Return the table of some measures, with the differences of some of them."""
    columns = [
        Column(f"{m.title} (%)" if percent and m.unit == "share" else m.title, m.better)
        for m in measures
    ]
    columns += [Column(f"{measure.name} against {comparison.reference}") for measure in compared]
    counts = {label: comparison.seed_count(label, measures) for label in comparison.labels}
    labels = [label for label, count in counts.items() if count]
    methods = [label for label in labels if label not in comparison.references]
    by_column = [
        _ranked([_value_cell(comparison.cell(label, m.key), m, percent) for label in labels],
                len(methods), m.better)
        for m in measures
    ] + [
        [difference_cell(comparison.cell(label, m.key), percent) for label in labels]
        for m in compared
    ]  # fmt: skip
    rows = [
        TableRow(label, counts[label], cells, label in comparison.references)
        for label, cells in zip(labels, zip(*by_column, strict=True), strict=True)
    ]
    return Table(title, tuple(columns), tuple(rows))


def difference_cell(cell: Cell | None, percent: bool = False) -> TableCell:
    """Return the cell of the difference from the reference."""
    if cell is None or cell.difference is None:
        return MISSING
    gap = cell.difference
    mean, *interval = (
        f"{100 * value:+.1f}" if percent else f"{value:+.3f}"
        for value in (gap.mean, gap.low, gap.high)
        if value is not None
    )
    ends = tuple(interval) if len(interval) == 2 else ()
    return TableCell(mean, gap.mean, ends, "sure" if gap.excludes_zero else "")


def _value_cell(cell: Cell | None, measure: Measure, percent: bool) -> TableCell:
    if cell is None:
        return MISSING
    summary = cell.summary
    text = format_value(measure, summary.mean, percent)
    if summary.std is None or (measure.unit == "bytes" and summary.std == 0):
        return TableCell(text, summary.mean)  # one seed, or equal in every run
    return TableCell(text, summary.mean, (format_value(measure, summary.std, percent),))


def _ranked(cells: list[TableCell], methods: int, better: Better) -> list[TableCell]:
    """Mark the best and the second of the first cells; cells of equal text share a rank."""
    means = {cell.text: cell.value for cell in cells[:methods] if cell.value is not None}
    if better is None or len(means) < 2:
        return cells
    order = sorted(means, key=lambda text: means[text], reverse=better == "higher")
    marks: dict[str, Mark] = {order[0]: "best", order[1]: "second"}
    ranked = [replace(cell, mark=marks.get(cell.text, cell.mark)) for cell in cells[:methods]]
    return ranked + cells[methods:]


def all_tables(comparison: Comparison, style: TableStyle | None = None) -> Iterator[Table]:
    """Yield every table that has rows, with all or the chosen measures."""
    style = style or TableStyle()
    for title, mode in table_sections(comparison):
        table = mode_table(comparison, mode, style=style, title=title)
        if table.rows:
            yield table
        by_task = comparison.measures_by_task(mode) if mode is not None else []
        if mode is not None and len(by_task) > 1 and not style.metrics:
            about = f"{title}: forgetting after each task"
            yield measures_table(comparison, by_task, percent=style.percent, title=about)


def short_tables(
    comparison: Comparison,
    style: TableStyle | None = None,
    differences: Sequence[str] = DIFFERENCES,
) -> Iterator[Table]:
    """Yield the table of each inference mode and of the costs, with main or chosen measures."""
    for title, mode in table_sections(comparison):
        shown = main_names(comparison, mode)
        table = mode_table(comparison, mode, shown, differences, style, title)
        if table.rows:
            yield table


def table_sections(comparison: Comparison) -> list[tuple[str, str | None]]:
    """Return the title and the mode of each table; modes with equal numbers share a table."""
    titles: dict[str, list[str]] = {}
    for mode in comparison.modes:
        twin = next((other for other in titles if _alike(comparison, mode, other)), mode)
        titles.setdefault(twin, []).append(mode)
    tables: list[tuple[str, str | None]] = [(", ".join(n), mode) for mode, n in titles.items()]
    return [*tables, ("cost", None)]


def _alike(comparison: Comparison, mode: str, other: str) -> bool:
    def values(mode: str) -> list[tuple[str, str, dict[int, float]]]:
        return [
            (label, measure.name, cell.by_seed)
            for label in comparison.labels
            for measure in comparison.measures_of(mode)
            if (cell := comparison.cell(label, measure.key))
        ]

    return values(mode) == values(other)
