"""Figures of what accuracy cost: bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from perdure.report.accuracy import ACCURACY, MODE_NAMES, average_accuracies, mean_line, spread_note
from perdure.report.figure_data import Axis, LineFigure, Series
from perdure.report.run_records import RunRecord, Runs

Cost = Callable[[RunRecord], list[float]]
"""What a run had spent at the end of each task."""


def cost_figures(runs: Runs, mode: str) -> list[LineFigure]:
    """A_t against the bytes that travelled and against the seconds that passed."""
    sent = cumulative_bytes(runs.records[0])
    divisor, unit = byte_unit(
        max(max(cumulative_bytes(record), default=0) for record in runs.records)
    )
    made = [
        _figure(
            runs, mode, "bytes", "bytes", f"sent up and down, all clients together ({unit})",
            "What would travel as encoded messages, both ways, of all clients together.",
            lambda record: [value / divisor for value in cumulative_bytes(record)],
        )
    ] if sent else []  # fmt: skip
    if all(record.result["seconds"].get("by_task") for record in runs.records):
        made.append(
            _figure(
                runs, mode, "seconds", "seconds", "wall-clock time (s)",
                "Training, consolidation and evaluation, on the machine that ran it: only runs of "
                "one machine under the same load compare.",
                lambda record: list(accumulate(record.result["seconds"]["by_task"])),
            )
        )  # fmt: skip
    return made


def cumulative_bytes(record: RunRecord) -> list[float]:
    """Bytes up and down until the end of each task."""
    by_task = record.result["bytes"].get("by_task", [])
    return list(accumulate(float(task["up"] + task["down"]) for task in by_task))


def byte_unit(most: float) -> tuple[float, str]:
    """A divisor and its unit, in steps of 1000, for numbers up to `most`."""
    units = ("B", "kB", "MB", "GB", "TB")
    step = 0
    while step < len(units) - 1 and most >= 1000 ** (step + 1):
        step += 1
    return 1000.0**step, units[step]


def _figure(
    runs: Runs, mode: str, key: str, what: str, axis: str, note: str, cost: Cost
) -> LineFigure:
    return LineFigure(
        f"{key}-{mode}",
        f"Average accuracy against {what}, {MODE_NAMES[mode]}",
        f"A_t (mean accuracy over the tasks so far) after each task; one marker a task. {note} "
        f"{spread_note(runs)}",
        Axis(axis, include_zero=True),
        ACCURACY,
        _trails(runs, mode, cost),
    )


def _trails(runs: Runs, mode: str, cost: Cost) -> tuple[Series, ...]:
    made = []
    for style, (name, group) in enumerate(runs.groups.items()):
        lines = [
            list(zip(cost(record), (y for _, y in average_accuracies(matrix)), strict=True))
            for record in group
            if (matrix := record.result["matrix"].get(mode)) and cost(record)
        ]
        if lines:
            made.append(Series(name, style, mean_line(lines)))
    return tuple(made)
