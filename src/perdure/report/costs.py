"""Figures of accuracy against its cost in bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from perdure.report.accuracy import MODE_NAMES, average_accuracies, mean_line, spread_note
from perdure.report.comparison_text import byte_unit
from perdure.report.figure_data import Axis, LineFigure, Series
from perdure.report.quantity import quantity_of
from perdure.report.run_records import RunRecord, Runs

Cost = Callable[[RunRecord], list[float]]
"""Returns the cumulative cost of a run at the end of each task."""


def cost_figures(runs: Runs, mode: str) -> list[LineFigure]:
    """Return the figures of A_t against transferred bytes and against seconds."""
    largest = max(max(cumulative_bytes(record), default=0) for record in runs.records)
    divisor, unit = byte_unit(largest)
    return [
        _figure(
            runs, mode, "bytes", "bytes", f"uploads and downloads of all clients ({unit})",
            "Size of the encoded messages of all clients, in both directions.",
            lambda record: [value / divisor for value in cumulative_bytes(record)],
        ),
        _figure(
            runs, mode, "seconds", "seconds", "wall-clock time (s)",
            "Training, consolidation and evaluation. Comparable only between runs on one "
            "machine under equal load.",
            lambda record: list(accumulate(record.result["seconds"]["by_task"])),
        ),
    ]  # fmt: skip


def cumulative_bytes(record: RunRecord) -> list[float]:
    """Return the bytes sent up and down until the end of each task."""
    by_task = record.result["bytes"]["by_task"]
    return list(accumulate(float(task["up"] + task["down"]) for task in by_task))


def _figure(
    runs: Runs, mode: str, key: str, what: str, axis: str, note: str, cost: Cost
) -> LineFigure:
    return LineFigure(
        f"{key}-{mode}",
        f"Average {quantity_of(runs).name} against {what}, {MODE_NAMES[mode]}",
        f"A_t (mean {quantity_of(runs).name} over the tasks so far) after each task; one marker "
        f"per task. {note} {spread_note(runs)}",
        Axis(axis, include_zero=True),
        quantity_of(runs).axis,
        _trails(runs, mode, cost),
    )


def _trails(runs: Runs, mode: str, cost: Cost) -> tuple[Series, ...]:
    series = []
    for style, (name, group) in enumerate(runs.groups.items()):
        lines = [
            list(zip(cost(record), (y for _, y in average_accuracies(matrix)), strict=True))
            for record in group
            if (matrix := record.result["matrix"].get(mode)) and cost(record)
        ]
        if lines:
            series.append(Series(name, style, mean_line(lines)))
    return tuple(series)
