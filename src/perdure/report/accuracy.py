"""Figures of accuracy and forgetting, by task and by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from perdure.evaluation.evaluator import MODES
from perdure.evaluation.forgetting import Matrix, drops_from_best, forgetting_by_task, learned_rows
from perdure.report.figure_data import (
    Axis,
    Cell,
    Figure,
    HeatMap,
    HeatMapFigure,
    LineFigure,
    Point,
    Series,
    quantity_of,
    summarize_seeds,
)
from perdure.report.records import RunRecord, Runs

# ------------------------------------------------------------------------------------------------
# Figures of accuracy and forgetting, made from the accuracy matrix of each inference mode.
# ------------------------------------------------------------------------------------------------

MODE_NAMES = {
    "task_agnostic": "task-agnostic",
    "task_aware": "task-aware",
    "routed": "routed",
}
"""Display names of the inference modes."""

MODE_MEANINGS = {
    "task_agnostic": "no task label is given; prediction among all classes seen so far",
    "task_aware": "the task label is given; prediction among the classes of that task",
    "routed": "no task label is given; prediction among the classes of the task that the method "
    "predicts",
}
"""One sentence per inference mode, shown in the report."""

LEARNED = Axis("tasks learned so far", integer=True)

Curve = Callable[[Matrix], list[tuple[float, float]]]
"""Returns the (x, y) points of a line, given the accuracy matrix of one run."""


def spread_note(runs: Runs) -> str:
    """Return the sentence of a caption that says which spread over seeds is shown."""
    most = max(len(group) for group in runs.groups.values())
    if most == 1:
        return "One seed, so no spread is shown."
    return f"Mean and one sample standard deviation over up to {most} seeds."


def matrices(group: Sequence[RunRecord], mode: str) -> list[Matrix]:
    """Return the accuracy matrices of the runs that were evaluated in a mode."""
    tables = (record.result["matrix"].get(mode) for record in group)
    return [matrix for matrix in tables if matrix]


def has_mode(runs: Runs, mode: str) -> bool:
    """Return whether some run was evaluated in a mode."""
    return any(matrices(group, mode) for group in runs.groups.values())


def shown_modes(runs: Runs) -> list[str]:
    """Return the modes to show: those of any run, except modes equal to the first one."""
    present = [mode for mode in MODES if has_mode(runs, mode)]
    return [mode for mode in present if mode == present[0] or not _repeats(runs, mode, present[0])]


def repeated_modes(runs: Runs) -> list[str]:
    """Return the modes that are not shown because their matrices equal those of the first mode."""
    shown = shown_modes(runs)
    return [mode for mode in MODES if mode not in shown and has_mode(runs, mode)]


def _repeats(runs: Runs, mode: str, first: str) -> bool:
    tables = (r.result["matrix"] for group in runs.groups.values() for r in group)
    return all(not matrix.get(mode) or matrix[mode] == matrix[first] for matrix in tables)


def accuracy_figures(runs: Runs, mode: str) -> list[HeatMapFigure | LineFigure]:
    """Return all figures of one mode; with a single task, only the matrix."""
    shown: list[HeatMapFigure | LineFigure] = [matrix_figure(runs, mode)]
    if runs.records[0].tasks > 1:
        shown += [
            average_figure(runs, mode), first_task_figure(runs, mode),
            learning_figure(runs, mode), forgetting_figure(runs, mode),
            forgetting_over_time_figure(runs, mode),
        ]  # fmt: skip
    return shown


def matrix_figure(runs: Runs, mode: str) -> HeatMapFigure:
    """Return one heat map per method: the accuracy on every task after every task."""
    panels = [
        HeatMap(name, _tasks(group), _tasks(group), mean_cells(matrices(group, mode)))
        for name, group in runs.groups.items()
        if matrices(group, mode)
    ]
    return HeatMapFigure(
        f"matrix-{mode}",
        f"{quantity_of(runs).title} on each task after each task, {MODE_NAMES[mode]}",
        f"a[i][j]: {quantity_of(runs).name} on the test data of task j after learning task i. The "
        "diagonal shows what was learned; each column shows, downwards, what is retained. "
        f"{spread_note(runs)}",
        "task j",
        "after task i",
        quantity_of(runs).axis.label,
        tuple(panels),
    )


def average_figure(runs: Runs, mode: str) -> LineFigure:
    """Return A_t, the mean accuracy over the tasks so far, after each task."""
    return LineFigure(
        f"average-{mode}",
        f"Average {quantity_of(runs).name} after each task, {MODE_NAMES[mode]}",
        f"A_t = 1/t sum_{{j<=t}} a[t][j]: mean {quantity_of(runs).name} over the tasks so far. Its "
        "last value is ACC, "
        f"its mean over time is Avg. {spread_note(runs)}",
        LEARNED,
        quantity_of(runs).axis,
        curves(runs, mode, average_accuracies),
    )


def first_task_figure(runs: Runs, mode: str) -> LineFigure:
    """Return a[t][1], the accuracy on the first task, after each task."""
    return LineFigure(
        f"first-task-{mode}",
        f"{quantity_of(runs).title} on the first task over time, {MODE_NAMES[mode]}",
        f"a[t][1]: {quantity_of(runs).name} on task 1 after learning task t. {spread_note(runs)}",
        LEARNED,
        quantity_of(runs).axis,
        curves(runs, mode, lambda matrix: _from_one([row[0] for row in learned_rows(matrix)])),
    )


def learning_figure(runs: Runs, mode: str) -> LineFigure:
    """Return a[j][j], the accuracy on each task right after learning it."""
    return LineFigure(
        f"learning-{mode}",
        f"{quantity_of(runs).title} on each task when new, {MODE_NAMES[mode]}",
        f"a[j][j], {quantity_of(runs).name} on task j right after learning it. Protecting old "
        f"tasks can reduce it. {spread_note(runs)}",
        Axis("task", integer=True),
        quantity_of(runs).axis,
        curves(runs, mode, lambda matrix: _from_one([row[-1] for row in learned_rows(matrix)])),
    )


def forgetting_figure(runs: Runs, mode: str) -> LineFigure:
    """Return the forgetting of each task, whose mean is AF."""
    return LineFigure(
        f"forgetting-{mode}",
        f"Forgetting of each task, {MODE_NAMES[mode]}",
        "f_j = max_{j<=i<T} a[i][j] - a[T][j]: how far task j ends below its best. Their sum "
        "divided by T-1 is AF, divided by T it is FT. A negative value is an improvement. "
        f"{spread_note(runs)}",
        Axis("task", integer=True),
        quantity_of(runs).forgetting,
        curves(runs, mode, forgetting_per_task),
    )


def forgetting_over_time_figure(runs: Runs, mode: str) -> LineFigure:
    """Return F_t, the mean forgetting of the earlier tasks, after each task but the first."""
    return LineFigure(
        f"forgetting-over-time-{mode}",
        f"Forgetting after each task, {MODE_NAMES[mode]}",
        "F_t = 1/(t-1) sum_{j<t} (max_{j<=i<t} a[i][j] - a[t][j]): how far the earlier tasks are "
        f"below their best after task t. Its last value is AF, its mean over time is F. "
        f"{spread_note(runs)}",
        LEARNED,
        quantity_of(runs).forgetting,
        curves(runs, mode, forgetting_over_time),
    )


def average_accuracies(matrix: Matrix) -> list[tuple[float, float]]:
    """Return the points (t, A_t), with t counted from 1."""
    return _from_one([sum(row) / len(row) for row in learned_rows(matrix)])


def forgetting_per_task(matrix: Matrix) -> list[tuple[float, float]]:
    """Return the points (j, forgetting of task j) of all tasks but the last, j counted from 1."""
    return _from_one(drops_from_best(learned_rows(matrix), len(matrix) - 1))


def forgetting_over_time(matrix: Matrix) -> list[tuple[float, float]]:
    """Return the points (t, F_t) after all tasks but the first, t counted from 1."""
    series = enumerate(forgetting_by_task(matrix), 1)
    return [(float(task), value) for task, value in series if value is not None]


def curves(runs: Runs, mode: str, curve: Curve) -> tuple[Series, ...]:
    """Return one line per group that was evaluated in a mode."""
    lines = []
    for style, (name, group) in enumerate(runs.groups.items()):
        points = [curve(matrix) for matrix in matrices(group, mode)]
        if points:
            lines.append(Series(name, style, mean_line(points)))
    return tuple(lines)


def mean_line(lines: Sequence[Sequence[tuple[float, float]]]) -> tuple[Point, ...]:
    """Return the mean of several lines, point by point.

    The lines have equally many points. Their x values are averaged as well: seconds differ by run.
    """
    mean_points = []
    for points in zip(*lines, strict=True):
        x, y = (summarize_seeds(values) for values in zip(*points, strict=True))
        if x is not None and y is not None:
            mean_points.append(Point(x.mean, y))
    return tuple(mean_points)


def mean_cells(tables: Sequence[Sequence[Sequence[float | None]]]) -> tuple[tuple[Cell, ...], ...]:
    """Return the mean and the spread of every cell over tables of one shape."""
    return tuple(
        tuple(summarize_seeds(values) for values in zip(*rows, strict=True))
        for rows in zip(*tables, strict=True)
    )


def _tasks(group: Sequence[RunRecord]) -> tuple[str, ...]:
    return tuple(str(number + 1) for number in range(group[0].tasks))


def _from_one(values: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(number), value) for number, value in enumerate(values, 1)]


# ------------------------------------------------------------------------------------------------
# Figures by round: the training loss, and the accuracy that `runs.evaluate_all` records.
# ------------------------------------------------------------------------------------------------

_ROUNDS = Axis("rounds so far, over all tasks", integer=True)
_MOST_TASKS = 10
_MOST_GROUPS = 4
Line = list[tuple[float, float]]
"""Points (rounds so far, value)."""


def round_figures(runs: Runs, modes: Sequence[str]) -> list[Figure]:
    """Return the figures for which at least one run has recorded values."""
    events = {name: [record.events for record in group] for name, group in runs.groups.items()}
    shown = [loss_figure(runs, events)]
    for mode in modes:
        shown.append(average_by_round_figure(runs, events, mode))
        if len(events) <= _MOST_GROUPS:
            shown += [tasks_by_round_figure(runs, name, each, mode, number)
                      for number, (name, each) in enumerate(events.items())]  # fmt: skip
    return [figure for figure in shown if figure is not None and figure.series]


Events = list[dict[str, Any]]


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
