"""Figures of accuracy and forgetting, from the accuracy matrices of each mode of inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perdure.contract.evaluation import MODES
from perdure.report.figure_data import (
    Axis,
    Cell,
    HeatMap,
    HeatMapFigure,
    LineFigure,
    Point,
    Series,
    summarize_seeds,
)
from perdure.report.run_records import RunRecord, Runs
from perdure.training.metrics import Matrix, drops_from_best

MODE_NAMES = {
    "task_agnostic": "task-agnostic",
    "task_aware": "task-aware",
    "routed": "routed",
}
"""The modes as they are written for people."""
MODE_MEANINGS = {
    "task_agnostic": "no task label: the best of all outputs of the tasks so far",
    "task_aware": "the task is told: the best of its own outputs",
    "routed": "no task label: the best of the outputs of the task that the method predicts",
}
ACCURACY = Axis("accuracy (share from 0 to 1)", limits=(0.0, 1.0), min_span=0.1)
LEARNED = Axis("tasks learned so far", integer=True)

Curve = Callable[[Matrix], list[tuple[float, float]]]
"""The points of a line, from one run's matrix."""


def spread_note(runs: Runs) -> str:
    """What the shown spread is, as part of a caption."""
    most = max(len(group) for group in runs.groups.values())
    if most == 1:
        return "One seed, so no spread is shown."
    return f"Mean and one sample standard deviation over up to {most} seeds."


def matrices(group: Sequence[RunRecord], mode: str) -> list[Matrix]:
    """The matrices of a group's runs, where they have this mode."""
    found = (record.result["matrix"].get(mode) for record in group)
    return [matrix for matrix in found if matrix]


def has_mode(runs: Runs, mode: str) -> bool:
    """Whether some run was judged in this mode."""
    return any(matrices(group, mode) for group in runs.groups.values())


def shown_modes(runs: Runs) -> list[str]:
    """The modes to show: those that some run has, without one that only repeats the first."""
    there = [mode for mode in MODES if has_mode(runs, mode)]
    return [mode for mode in there if mode == there[0] or not _repeats(runs, mode, there[0])]


def repeated_modes(runs: Runs) -> list[str]:
    """The modes that are left out because they say the same as the first."""
    shown = shown_modes(runs)
    return [mode for mode in MODES if mode not in shown and has_mode(runs, mode)]


def _repeats(runs: Runs, mode: str, first: str) -> bool:
    found = (r.result["matrix"] for group in runs.groups.values() for r in group)
    return all(not matrix.get(mode) or matrix[mode] == matrix[first] for matrix in found)


def accuracy_figures(runs: Runs, mode: str) -> list[HeatMapFigure | LineFigure]:
    """All figures of one mode; those that compare two moments need two tasks."""
    made: list[HeatMapFigure | LineFigure] = [matrix_figure(runs, mode)]
    if runs.records[0].tasks > 1:
        made += [
            average_figure(runs, mode), first_task_figure(runs, mode),
            learning_figure(runs, mode), forgetting_figure(runs, mode),
        ]  # fmt: skip
    return made


def matrix_figure(runs: Runs, mode: str) -> HeatMapFigure:
    """The whole matrix of every method."""
    panels = [
        HeatMap(name, _tasks(group), _tasks(group), mean_cells(matrices(group, mode)))
        for name, group in runs.groups.items()
        if matrices(group, mode)
    ]
    return HeatMapFigure(
        f"matrix-{mode}",
        f"Accuracy on each task after each task, {MODE_NAMES[mode]}",
        "a[i][j]: accuracy on the test data of task j after learning task i. The diagonal is what "
        f"was learned; down a column is what was kept. {spread_note(runs)}",
        "task j",
        "after task i",
        ACCURACY.label,
        tuple(panels),
    )


def average_figure(runs: Runs, mode: str) -> LineFigure:
    """A_t over time."""
    return LineFigure(
        f"average-{mode}",
        f"Average accuracy after each task, {MODE_NAMES[mode]}",
        "A_t = 1/t sum_{j<=t} a[t][j]: mean accuracy over the tasks so far. Its last value is ACC, "
        f"its mean over time is Avg. {spread_note(runs)}",
        LEARNED,
        ACCURACY,
        curves(runs, mode, average_accuracies),
    )


def first_task_figure(runs: Runs, mode: str) -> LineFigure:
    """a[t][1] over time."""
    return LineFigure(
        f"first-task-{mode}",
        f"Accuracy on the first task over time, {MODE_NAMES[mode]}",
        f"a[t][1]: accuracy on task 1 after learning task t. {spread_note(runs)}",
        LEARNED,
        ACCURACY,
        curves(runs, mode, lambda matrix: _from_one([row[0] for row in learned_rows(matrix)])),
    )


def learning_figure(runs: Runs, mode: str) -> LineFigure:
    """a[j][j]."""
    return LineFigure(
        f"learning-{mode}",
        f"Accuracy on each task when new, {MODE_NAMES[mode]}",
        "a[j][j], accuracy on task j right after learning it: what is still learned. What protects "
        f"old tasks may cost it. {spread_note(runs)}",
        Axis("task", integer=True),
        ACCURACY,
        curves(runs, mode, lambda matrix: _from_one([row[-1] for row in learned_rows(matrix)])),
    )


def forgetting_figure(runs: Runs, mode: str) -> LineFigure:
    """The terms of AF and FT."""
    return LineFigure(
        f"forgetting-{mode}",
        f"Forgetting of each task, {MODE_NAMES[mode]}",
        "f_j = max_{j<=i<T} a[i][j] - a[T][j]: how far task j ends below its best. Their sum "
        "divided by T-1 is AF, divided by T it is FT. A negative value is an improvement. "
        f"{spread_note(runs)}",
        Axis("task", integer=True),
        Axis(
            "forgetting (difference of accuracies)",
            include_zero=True,
            limits=(-1.0, 1.0),
            min_span=0.1,
        ),
        curves(runs, mode, forgetting_per_task),
    )


def average_accuracies(matrix: Matrix) -> list[tuple[float, float]]:
    """A_t after each task, counted from 1."""
    return _from_one([sum(row) / len(row) for row in learned_rows(matrix)])


def forgetting_per_task(matrix: Matrix) -> list[tuple[float, float]]:
    """The forgetting of each task but the last, counted from 1."""
    return _from_one(drops_from_best(learned_rows(matrix), len(matrix) - 1))


def learned_rows(matrix: Matrix) -> list[list[float]]:
    """The rows without the tasks that are still to come."""
    return [[value for value in row if value is not None] for row in matrix]


def curves(runs: Runs, mode: str, curve: Curve) -> tuple[Series, ...]:
    """One line a group that has this mode."""
    found = []
    for style, (name, group) in enumerate(runs.groups.items()):
        points = [curve(matrix) for matrix in matrices(group, mode)]
        if points:
            found.append(Series(name, style, mean_line(points)))
    return tuple(found)


def mean_line(lines: Sequence[Sequence[tuple[float, float]]]) -> tuple[Point, ...]:
    """Several runs' lines as one, point by point; x is averaged too, as it may be seconds."""
    made = []
    for points in zip(*lines, strict=True):
        x, y = (summarize_seeds(values) for values in zip(*points, strict=True))
        if x is not None and y is not None:
            made.append(Point(x.mean, y))
    return tuple(made)


def mean_cells(tables: Sequence[Sequence[Sequence[float | None]]]) -> tuple[tuple[Cell, ...], ...]:
    """Several runs' tables of one shape as one table of means and spreads."""
    return tuple(
        tuple(summarize_seeds(values) for values in zip(*rows, strict=True))
        for rows in zip(*tables, strict=True)
    )


def _tasks(group: Sequence[RunRecord]) -> tuple[str, ...]:
    return tuple(str(number + 1) for number in range(group[0].tasks))


def _from_one(values: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(number), value) for number, value in enumerate(values, 1)]
