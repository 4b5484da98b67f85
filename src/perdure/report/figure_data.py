"""What a figure says, apart from how it is drawn: the page and the image files draw the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.report.statistics import Summary, summarize

_MANY_POINTS = 30
Cell = Summary | None
"""None: there is no such number."""


def summarize_seeds(values: Sequence[float | None]) -> Cell:
    """The mean and the spread of the numbers that are there."""
    return summarize([value for value in values if value is not None])


@dataclass(frozen=True)
class Point:
    """A place on a line."""

    x: float
    y: Summary


@dataclass(frozen=True)
class Series:
    """A line: its name, its points, and which of the palette's styles it has."""

    name: str
    style: int
    points: tuple[Point, ...]
    dashed: bool = False
    """Told apart from another line of the same style."""

    @property
    def mark_every(self) -> int:
        """Points from one marker to the next: many of them would hide the line."""
        count = len(self.points)
        return 1 if count < _MANY_POINTS else count // 8


@dataclass(frozen=True)
class Axis:
    """What an axis shows, with its unit in the words."""

    label: str
    integer: bool = False
    """Only whole numbers, such as tasks."""
    include_zero: bool = False
    """Zero is on it."""
    limits: tuple[float, float] | None = None
    """It does not go beyond these, such as 0 and 1 of an accuracy."""
    min_span: float = 0.0
    """It shows at least this much, so that a tiny difference does not look large."""


@dataclass(frozen=True)
class LineFigure:
    """Lines over a common axis."""

    key: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]


@dataclass(frozen=True)
class HeatMap:
    """One heat map: shares from 0 to 1 with names of rows and columns."""

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class HeatMapFigure:
    """Heat maps of one kind beside each other."""

    key: str
    title: str
    caption: str
    x: str
    """What the columns are."""
    y: str
    """What the rows are."""
    value: str
    """What the cells are, with the unit."""
    panels: tuple[HeatMap, ...]


Figure = LineFigure | HeatMapFigure
