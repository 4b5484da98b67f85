"""Timing contenders against each other: in turns, by the ratio within a turn.

A slow moment of the machine hits all that run in the same turn alike, so ratios within a turn are
steadier than ratios of best or median times. Each turn begins with another contender.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Contenders = Mapping[str, Callable[[], object]]


def timed_turns(contenders: Contenders, repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Return the seconds of each contender in every turn, after some that are not counted."""
    for contender in contenders.values():  # traces, calibrates, warms up
        for _ in range(warm_up):
            contender()
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            contenders[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(over: list[float], under: list[float]) -> float:
    """Return the median ratio, over turns, of the seconds of one contender to those of another."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
