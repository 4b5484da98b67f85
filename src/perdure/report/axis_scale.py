"""Choose the ends and the ticks of an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perdure.report.figure_data import Axis, Series

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

    def fraction(self, value: float) -> float:
        """Return the position of a value between the ends, from 0 (`low`) to 1 (`high`)."""
        return (value - self.low) / (self.high - self.low)

    def tick_label(self, tick: float) -> str:
        """Return the text of a tick, with the decimals that the distance between ticks requires."""
        if self.names:
            return self.names[self.ticks.index(tick)]
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        decimals = max(0, -math.floor(math.log10(step) + 1e-9))
        return f"{tick + 0.0:.{decimals}f}"


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
    """Return a scale that contains the values, with round ends within the limits of the axis.

    Args:
        axis: Limits and minimum span of the axis.
        values: Values to show; at least one.
    """
    low, high = min(values), max(values)
    if axis.include_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if axis.integer:
        return _integer_scale(low, high)
    low, high = _widened(low, high, axis)
    step = _round_step((high - low) / 5 or max(abs(high), 1.0) / 5)
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


def _round_step(rough: float) -> float:
    """Round a step up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
