"""Means over seeds, and differences between methods that saw the same seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""Confidence level of every interval."""


@dataclass(frozen=True)
class Summary:
    """A measured value over seeds."""

    count: int
    mean: float
    std: float | None
    """Sample standard deviation (divided by n-1); None with one seed."""


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its interval (Student t, two-sided, LEVEL)."""

    count: int
    mean: float
    low: float | None
    """None with one pair, from which no spread can be told."""
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval leaves zero out."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def summarize(values: Sequence[float]) -> Summary | None:
    """Mean and sample standard deviation; None of nothing.

    >>> summarize([1.0, 3.0])
    Summary(count=2, mean=2.0, std=1.4142135623730951)
    """
    if not values:
        return None
    return Summary(len(values), _mean(values), _std(values))


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Ours minus theirs over the seeds that both have; None if they share no seed.

    The interval is mean +- t * s / sqrt(n) with s the sample standard deviation of the differences
    and t the quantile of Student's distribution with n-1 degrees of freedom. It assumes that the
    differences are about normal, which few seeds cannot show.
    """
    gaps = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not gaps:
        return None
    mean, std = _mean(gaps), _std(gaps)
    if std is None:
        return Difference(1, mean, None, None)
    from scipy.special import stdtrit  # not at the top: every command would pay for it

    half = float(stdtrit(len(gaps) - 1, (1 + LEVEL) / 2)) * std / math.sqrt(len(gaps))
    return Difference(len(gaps), mean, mean - half, mean + half)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
