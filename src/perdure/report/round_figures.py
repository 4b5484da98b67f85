"""Figures by round: the training loss, and the accuracy that `runs.evaluate_all` records."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from perdure.core.errors import UserError
from perdure.report.accuracy import MODE_NAMES, mean_line, spread_note
from perdure.report.figure_data import Axis, Figure, LineFigure, Series
from perdure.report.quantity import quantity_of
from perdure.report.run_records import RunRecord, Runs

_log = logging.getLogger(__name__)
_ROUNDS = Axis("rounds so far, over all tasks", integer=True)
_MOST_TASKS = 10
_MOST_GROUPS = 4
Line = list[tuple[float, float]]
"""Points (rounds so far, value)."""


def round_figures(runs: Runs, modes: Sequence[str]) -> list[Figure]:
    """Return the figures for which at least one run has recorded values."""
    events = {name: [_events(record) for record in group] for name, group in runs.groups.items()}
    shown = [loss_figure(runs, events)]
    for mode in modes:
        shown.append(average_by_round_figure(runs, events, mode))
        if len(events) <= _MOST_GROUPS:
            shown += [tasks_by_round_figure(runs, name, each, mode, number)
                      for number, (name, each) in enumerate(events.items())]  # fmt: skip
    return [figure for figure in shown if figure is not None and figure.series]


Events = list[dict[str, Any]]


def _events(record: RunRecord) -> Events:
    """Return the events of a run; none if they cannot be read."""
    try:
        return list(record.events())
    except (UserError, OSError) as error:
        _log.warning("%s", error)
        return []


def loss_figure(runs: Runs, events: dict[str, list[Events]]) -> LineFigure:
    """Return the training loss by round."""
    return LineFigure(
        "training-loss",
        "Training loss by round",
        "Mean over the local steps of the clients of a round, weighted as in aggregation, of the "
        f"loss that they minimize, with the terms that a method adds. {spread_note(runs)}",
        _ROUNDS,
        Axis("training loss", include_zero=True),
        _series(events, losses),
    )


def losses(events: Events) -> Line:
    """Return the training loss of every round that has one."""
    rounds = [event.get("loss") for event in events if event.get("event") == "round"]
    return [(float(n), loss) for n, loss in enumerate(rounds, 1) if loss is not None]


def average_by_round_figure(runs: Runs, events: dict[str, list[Events]], mode: str) -> LineFigure:
    """Return the mean accuracy over the tasks so far, by round."""
    return LineFigure(
        f"average-by-round-{mode}",
        f"Average {quantity_of(runs).name} by round, {MODE_NAMES[mode]}",
        f"Mean {quantity_of(runs).name} over the tasks so far, the current one included, within "
        f"tasks and at their ends. {spread_note(runs)}",
        _ROUNDS,
        quantity_of(runs).axis,
        _series(events, lambda each: [(n, sum(a) / len(a)) for n, a in accuracies(each, mode)]),
    )


def tasks_by_round_figure(
    runs: Runs, name: str, events: list[Events], mode: str, number: int
) -> LineFigure:
    """Return the accuracy on each task by round, of one method."""
    tasks = max((len(a) for each in events for _, a in accuracies(each, mode)), default=0)
    step = -(-tasks // _MOST_TASKS) or 1
    lines = {
        f"task {task + 1}": [_of_task(accuracies(each, mode), task) for each in events]
        for task in range(0, tasks, step)
    }
    return LineFigure(
        f"tasks-by-round-{mode}-{number}",
        f"{quantity_of(runs).title} on each task by round, {name}, {MODE_NAMES[mode]}",
        f"{quantity_of(runs).title} on the test data of a task from its first round on: what is "
        f"learned of it, and what later tasks leave of it. {spread_note(runs)}",
        _ROUNDS,
        quantity_of(runs).axis,
        tuple(
            Series(label, style, mean_line(_same_length(points)))
            for style, (label, points) in enumerate(lines.items())
        ),
    )


def _of_task(rows: list[tuple[float, list[float]]], task: int) -> Line:
    return [(number, values[task]) for number, values in rows if task < len(values)]


def accuracies(events: Events, mode: str) -> list[tuple[float, list[float]]]:
    """Return rounds so far and the accuracies on the tasks so far, where all were evaluated.

    At the end of a task its last evaluation counts. Empty without `runs.evaluate_all`.
    """
    found: dict[float, list[float]] = {}
    rounds, is_by_round = 0, False
    for event in events:
        rounds += event.get("event") == "round"
        is_by_round = is_by_round or "accuracies" in event
        key = "accuracies" if event.get("event") == "round" else "accuracy"
        values = [v for v in (event.get(key) or {}).get(mode) or [] if v is not None]
        if values and event.get("event") in ("round", "task"):
            found[float(rounds)] = values
    return sorted(found.items()) if is_by_round else []


def _series(events: dict[str, list[Events]], line: Callable[[Events], Line]) -> tuple[Series, ...]:
    shown = []
    for style, (name, group) in enumerate(events.items()):
        points = _same_length([line(each) for each in group])
        if points and points[0]:
            shown.append(Series(name, style, mean_line(points)))
    return tuple(shown)


def _same_length(lines: list[Line]) -> list[Line]:
    """Return the lines that are not empty, cut to the length of the shortest."""
    filled = [line for line in lines if line]
    shortest = min((len(line) for line in filled), default=0)
    return [line[:shortest] for line in filled]
