"""Means over seeds, and paired differences between methods that were run with the same seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    return Summary(len(values), _mean(values), _std(values))


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Return the mean of `ours - theirs` over the seeds that both have, and its interval.

    The interval is mean +- t * s / sqrt(n) with s the sample standard deviation of the differences
    and t the quantile of Student's distribution with n-1 degrees of freedom. It assumes that the
    differences are approximately normal, which few seeds cannot show.

    Args:
        ours: Value of each seed.
        theirs: Value of each seed, of the method to compare with.

    Returns:
        The difference, or None if there is no common seed.
    """
    gaps = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not gaps:
        return None
    mean, std = _mean(gaps), _std(gaps)
    if std is None:
        return Difference(1, mean, None, None)
    from scipy.special import stdtrit  # imported here, since it slows down every command

    half = float(stdtrit(len(gaps) - 1, (1 + LEVEL) / 2)) * std / math.sqrt(len(gaps))
    return Difference(len(gaps), mean, mean - half, mean + half)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
