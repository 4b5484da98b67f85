"""The content of figures, independent of how they are drawn: means over seeds, axes, series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perdure.evaluation.forgetting import DEFINITIONS
from perdure.report.records import Runs

# ---- Means over seeds, and paired differences between methods that were run with the same seeds

LEVEL = 0.95
"""Confidence level of every interval."""


@dataclass(frozen=True)
class Summary:
    """Mean and spread of a value over seeds."""

    count: int
    """Number of seeds."""
    mean: float
    """Arithmetic mean."""
    std: float | None
    """Sample standard deviation (divided by n-1); None for a single seed."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its interval (Student t, two-sided, LEVEL)."""

    count: int
    """Number of pairs, that is, of seeds that both methods have."""
    mean: float
    """Mean difference."""
    low: float | None
    """Lower end of the interval; None for a single pair, which has no spread."""
    high: float | None
    """Upper end of the interval; None for a single pair."""

    @property
    def excludes_zero(self) -> bool:
        """Return whether the interval does not contain zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def summarize(values: Sequence[float]) -> Summary | None:
    """Return the mean and the sample standard deviation, or None if there are no values.

    Example:
        >>> summarize([1.0, 3.0])
        Summary(count=2, mean=2.0, std=1.4142135623730951)
    """
    if not values:
        return None
    count = len(values)
    mean, std = math.fsum(values) / count, None
    if count > 1:
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Summary(count, mean, std)


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Return the mean of `ours - theirs` over the seeds that both have, and its interval.

    The interval is mean +- t * s / sqrt(n) with s the sample standard deviation of the differences
    and t the quantile of Student's distribution with n-1 degrees of freedom. It assumes that the
    differences are approximately normal, which few seeds cannot show.
    """
    gaps = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    summary = summarize(gaps)
    if summary is None:
        return None
    mean, std = summary.mean, summary.std
    if std is None:
        return Difference(1, mean, None, None)
    from scipy.special import stdtrit  # imported here, since it slows down every command

    half = float(stdtrit(len(gaps) - 1, (1 + LEVEL) / 2)) * std / math.sqrt(len(gaps))
    return Difference(len(gaps), mean, mean - half, mean + half)


# ---- The content of figures, independent of how they are drawn (SVG in the page, or matplotlib)

_MANY_POINTS = 30
Cell = Summary | None
"""Mean and spread of a value over seeds; None if no run has the value."""


def summarize_seeds(values: Sequence[float | None]) -> Cell:
    """Return the mean and the spread of the values that are not None, or None if all are."""
    return summarize([value for value in values if value is not None])


@dataclass(frozen=True)
class Point:
    """A point of a line: a position on the x axis, and a value with its spread over seeds."""

    x: float
    y: Summary


@dataclass(frozen=True)
class Series:
    """A line of a chart."""

    name: str
    """Label in the legend."""
    style: int
    """Index into the colors and markers of the palette."""
    points: tuple[Point, ...]
    dashed: bool = False
    """Whether the line is dashed, to distinguish it from another line of the same style."""

    @property
    def mark_every(self) -> int:
        """Return the number of points per marker; more markers would hide a long line."""
        count = len(self.points)
        return 1 if count < _MANY_POINTS else count // 8


@dataclass(frozen=True)
class Axis:
    """An axis of a chart."""

    label: str
    """Name of the quantity, with its unit."""
    integer: bool = False
    """Whether ticks are integers, such as task numbers."""
    include_zero: bool = False
    """Whether the axis contains zero."""
    limits: tuple[float, float] | None = None
    """Smallest and largest possible value, such as 0 and 1 of an accuracy. If None, unlimited."""
    min_span: float = 0.0
    """Minimum length of the axis, so that a tiny difference does not look large."""
    names: tuple[str, ...] = ()
    """Names of the positions 0, 1, ... on it. If empty, positions are numbers."""

    def position_name(self, x: float, digits: int = 6) -> str:
        """Return a position as text."""
        return self.names[round(x)] if self.names else f"{x:.{digits}g}"


@dataclass(frozen=True)
class LineFigure:
    """A line chart."""

    key: str
    """Identifier: the file name of the image, and part of the id in the page."""
    title: str
    """Heading of the figure."""
    caption: str
    """Definition of what is shown."""
    x: Axis
    """Horizontal axis."""
    y: Axis
    """Vertical axis."""
    series: tuple[Series, ...]
    """The lines, in the order of the legend."""


@dataclass(frozen=True)
class HeatMap:
    """One heat map: a table of values, mostly fractions from 0 to 1."""

    name: str
    """Heading, such as the name of a method."""
    rows: tuple[str, ...]
    """Labels of the rows."""
    columns: tuple[str, ...]
    """Labels of the columns."""
    cells: tuple[tuple[Cell, ...], ...]
    """Values, one tuple per row."""


@dataclass(frozen=True)
class HeatMapFigure:
    """A figure of several heat maps, such as one per method."""

    key: str
    """Identifier: the file name of the image, and part of the id in the page."""
    title: str
    """Heading of the figure."""
    caption: str
    """Definition of what is shown."""
    x: str
    """Name of the columns."""
    y: str
    """Name of the rows."""
    value: str
    """Name of the values, with their unit."""
    panels: tuple[HeatMap, ...]
    """The heat maps, in the order in which they are shown."""
    limits: tuple[float, float] = (0.0, 1.0)
    """Values with the lightest and the darkest color."""

    def fraction(self, value: float) -> float:
        """Return the position of a value between the limits, 0 to 1 within them."""
        low, high = self.limits
        return (value - low) / (high - low)


Figure = LineFigure | HeatMapFigure


# ---- What the matrices of runs hold: accuracy, or R2 of predicted numbers


@dataclass(frozen=True)
class Quantity:
    """The quantity of the matrices, with its axes."""

    name: str
    """Its name in sentences."""
    about: str
    """A sentence on its values."""
    axis: Axis
    """The axis of its values."""
    forgetting: Axis
    """The axis of its differences."""

    @property
    def title(self) -> str:
        """The name at the beginning of a title."""
        return self.as_title("accuracy")

    def as_title(self, text: str) -> str:
        """Return a title about accuracy as one about this quantity, with a capital letter."""
        worded = self.worded(text)
        return worded[:1].upper() + worded[1:]

    @property
    def definitions(self) -> dict[str, str]:
        """The definitions of the metrics, which are those of this quantity."""
        return {name: self.worded(meaning) for name, meaning in DEFINITIONS.items()}

    def mode_meaning(self, meaning: str) -> str:
        """Return the meaning of an inference mode; numbers are not predicted among classes."""
        return meaning.partition(";")[0] if self.name == "R2" else meaning

    def worded(self, text: str) -> str:
        """Return a sentence about accuracy as one about this quantity."""
        return text.replace("accuracy", self.name)


ACCURACY = Quantity(
    "accuracy",
    "Accuracies are fractions from 0 to 1.",
    Axis("accuracy (fraction from 0 to 1)", limits=(0.0, 1.0), min_span=0.1),
    Axis(
        "forgetting (difference of accuracies)", include_zero=True, limits=(-1.0, 1.0), min_span=0.1
    ),
)
R2 = Quantity(
    "R2",
    "ACC and the other metrics of the tables are those of R2: 1 is perfect, 0 is as good as always "
    "predicting the mean.",
    Axis("R2 (1 is perfect, 0 always the mean)", min_span=0.1),
    Axis("forgetting (difference of R2)", include_zero=True, min_span=0.1),
)


def quantity_of(runs: Runs) -> Quantity:
    """Return what the matrices of runs hold; the first run decides."""
    is_number = runs.records[0].result["measure"] == "r2"
    return R2 if is_number else ACCURACY
