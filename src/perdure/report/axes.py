"""The ends and ticks of axes, and colors that color-blind readers can distinguish."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perdure.report.figure_data import Axis, Series

# ---- Colors that color-blind readers can distinguish, on light and on dark background
#
# Lines use Okabe and Ito's hues, darkened for white and lightened for black background until the
# contrast suffices; markers and dashes distinguish them without color. Heat maps map 0 to the
# background and 1 to a strong blue, so that large values stand out in both themes.

Rgb = tuple[int, int, int]

LIGHT_PAPER, DARK_PAPER = "#ffffff", "#14171c"
LIGHT = ("#0072b2", "#c94f00", "#00805d", "#a3478c", "#9a6a00", "#2b8cc4", "#4d4d4d")
DARK = ("#56b4e9", "#f08a4b", "#2fc79c", "#e39cc8", "#f0c04a", "#a9c7ff", "#c9c9c9")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus", "ring")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 2", "12 4")


def dash_pattern(style: int, second: bool = False) -> str:
    """Return the dash pattern of a line as in SVG's stroke-dasharray; empty if it is solid."""
    return DASHES[(style // len(LIGHT) + second) % len(DASHES)]


LEVELS = 20
"""Number of the highest color of heat maps; the lowest is 0."""
_LIGHT_SCALE: tuple[Rgb, ...] = ((247, 250, 253), (158, 202, 225), (49, 130, 189), (8, 48, 107))
_DARK_SCALE: tuple[Rgb, ...] = ((27, 32, 39), (24, 68, 112), (49, 130, 189), (190, 222, 245))


def heat_level(fraction: float) -> int:
    """Return the number of the color, 0 to LEVELS, that represents a fraction."""
    return round(min(max(fraction, 0.0), 1.0) * LEVELS)


def heat_color(step: int, dark: bool = False) -> str:
    """Return the background color of a heat map cell as #rrggbb."""
    stops = _DARK_SCALE if dark else _LIGHT_SCALE
    position = step / LEVELS * (len(stops) - 1)
    first = min(int(position), len(stops) - 2)
    shares = zip(stops[first], stops[first + 1], strict=True)
    mixed = [round(a + (b - a) * (position - first)) for a, b in shares]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def text_color(paper: str) -> str:
    """Return black or white, whichever has more contrast to a background color."""
    black_is_nearer = (_luminance(paper) + 0.05) ** 2 < 0.05 * 1.05  # luminance 0 and 1, plus 0.05
    return "#ffffff" if black_is_nearer else "#000000"


def contrast_ratio(one: str, other: str) -> float:
    """Return the contrast ratio of two colors by WCAG 2, from 1 to 21."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    luminance = 0.0
    for at, weight in ((1, 0.2126), (3, 0.7152), (5, 0.0722)):
        part = int(color[at : at + 2], 16) / 255
        luminance += weight * (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4)
    return luminance


_MAX_INTEGER_TICKS = 10


@dataclass(frozen=True)
class Scale:
    """The ends and the ticks of an axis, in the unit of its values."""

    low: float
    """Value at the left or lower end."""
    high: float
    """Value at the right or upper end."""
    ticks: tuple[float, ...]
    """Values that are labeled, in ascending order."""
    names: tuple[str, ...] = ()
    """Labels of the ticks. If empty, their values."""

    @property
    def tick_labels(self) -> list[str]:
        """The texts of the ticks, with the decimals that the distance between ticks requires."""
        if self.names:
            return list(self.names)
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return [f"{tick + 0.0:.{decimals}f}" for tick in self.ticks]


def x_scale(axis: Axis, series: tuple[Series, ...]) -> Scale:
    """Return the scale of the horizontal axis of some lines."""
    if axis.names:
        count = len(axis.names)
        return Scale(-0.5, count - 0.5, tuple(float(n) for n in range(count)), axis.names)
    return make_scale(axis, [point.x for line in series for point in line.points])


def y_scale(axis: Axis, series: tuple[Series, ...]) -> Scale:
    """Return the scale of the vertical axis of some lines, wide enough for their bands."""
    values = []
    for line in series:
        for point in line.points:
            half = point.y.std or 0.0
            values += [point.y.mean - half, point.y.mean + half]
    return make_scale(axis, values)


def make_scale(axis: Axis, values: list[float]) -> Scale:
    """Return a scale that contains the values, with round ends within the limits of the axis."""
    low, high = min(values), max(values)
    if axis.include_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if axis.integer:
        return _integer_scale(low, high)
    low, high = _widened(low, high, axis)
    rough = (high - low) / 5 or max(abs(high), 1.0) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    if axis.limits is not None:
        low, high = max(low, axis.limits[0]), min(high, axis.limits[1])
    if high - low < step:
        low, high = (low, low + step) if low <= 0 else (high - step, high)
    count = round((high - low) / step)
    return Scale(low, high, tuple(low + step * n for n in range(count + 1)))


def _widened(low: float, high: float, axis: Axis) -> tuple[float, float]:
    """Widen an interval to the minimum span of the axis, within its limits."""
    lack = axis.min_span - (high - low)
    if lack <= 0:
        return low, high
    low, high = low - lack / 2, high + lack / 2
    if axis.limits is None:
        return low, high
    over, under = max(0.0, high - axis.limits[1]), max(0.0, axis.limits[0] - low)
    return low - over + under, high - over + under


def _integer_scale(low: float, high: float) -> Scale:
    """Return integer ticks with a margin on both sides, so that no marker touches the frame."""
    step = max(1, math.ceil((high - low + 1) / _MAX_INTEGER_TICKS))
    step = step if step < 5 else math.ceil(step / 5) * 5
    first = math.ceil(low / step) * step if step > 1 else low
    ticks, tick = [], first
    while tick <= high:
        ticks.append(tick)
        tick += step
    margin = 0.5 if high - low < 30 else (high - low) / 60
    return Scale(low - margin, high + margin, tuple(ticks))
