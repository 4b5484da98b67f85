"""Time contenders in turns and compare them by the ratio within a turn.

A slow moment of the machine affects all contenders of a turn, so ratios within a turn vary less
than ratios of best or median times. Each turn starts with another contender.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Contenders = Mapping[str, Callable[[], object]]


def timed_turns(
    contenders: Contenders,
    repeats: int,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each contender per turn, without `warm_up` first calls.

    Args:
        contenders: What is timed.
        repeats: Number of turns.
        warm_up: Calls of each before the first turn.
        clock: Returns the time in seconds; `time.process_time` for CPU time.
    """
    for contender in contenders.values():  # traces, calibrates, warms up
        for _ in range(warm_up):
            contender()
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            contenders[name]()
            seconds[name].append(clock() - start)
    return seconds


def median_ratio(over: list[float], under: list[float]) -> float:
    """Return the median over turns of the ratio of two contenders' seconds."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))
