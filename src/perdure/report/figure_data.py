"""The content of figures, independent of how they are drawn (SVG in the page, or matplotlib)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.report.statistics import Summary, summarize

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
