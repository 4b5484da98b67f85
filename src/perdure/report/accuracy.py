"""Figures of accuracy and forgetting, by task and by round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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

# ---- Figures of accuracy and forgetting, made from the accuracy matrix of each inference mode

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
    tables = [r.result["matrix"] for group in runs.groups.values() for r in group]
    return [
        mode
        for mode in present
        if mode == present[0]
        or any(matrix.get(mode) and matrix[mode] != matrix[present[0]] for matrix in tables)
    ]


def repeated_modes(runs: Runs) -> list[str]:
    """Return the modes that are not shown because their matrices equal those of the first mode."""
    shown = shown_modes(runs)
    return [mode for mode in MODES if mode not in shown and has_mode(runs, mode)]


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


@dataclass(frozen=True)
class Chart:
    """A chart of numbers that follow from the accuracy matrix, with one line per method."""

    key: str
    """Beginning of the key of its figures."""
    title: str
    """Its title, before the inference mode."""
    caption: str
    """Definition of what is shown, before the sentence on the spread."""
    x: Axis
    """Horizontal axis."""
    curve: Curve
    """The points of a run."""
    is_forgetting: bool = False
    """Whether it shows differences."""


_TASK = Axis("task", integer=True)
CHARTS = (
    Chart(
        "average",
        "Average accuracy after each task",
        "A_t = 1/t sum_{j<=t} a[t][j]: mean accuracy over the tasks so far. Its last value is ACC, "
        "its mean over time is Avg.",
        LEARNED,
        average_accuracies,
    ),
    Chart(
        "first-task",
        "accuracy on the first task over time",
        "a[t][1]: accuracy on task 1 after learning task t.",
        LEARNED,
        lambda matrix: _from_one([row[0] for row in learned_rows(matrix)]),
    ),
    Chart(
        "learning",
        "accuracy on each task when new",
        "a[j][j], accuracy on task j right after learning it. Protecting old tasks can reduce it.",
        _TASK,
        lambda matrix: _from_one([row[-1] for row in learned_rows(matrix)]),
    ),
    Chart(
        "forgetting",
        "Forgetting of each task",
        "f_j = max_{j<=i<T} a[i][j] - a[T][j]: how far task j ends below its best. Their sum "
        "divided by T-1 is AF, divided by T it is FT. A negative value is an improvement.",
        _TASK,
        forgetting_per_task,
        is_forgetting=True,
    ),
    Chart(
        "forgetting-over-time",
        "Forgetting after each task",
        "F_t = 1/(t-1) sum_{j<t} (max_{j<=i<t} a[i][j] - a[t][j]): how far the earlier tasks are "
        "below their best after task t. Its last value is AF, its mean over time is F.",
        LEARNED,
        forgetting_over_time,
        is_forgetting=True,
    ),
)
"""The charts of each inference mode, of runs with several tasks."""


def accuracy_figures(runs: Runs, mode: str) -> list[Figure]:
    """Return all figures of one mode: the matrix and, with several tasks, the charts."""
    quantity, spread = quantity_of(runs), spread_note(runs)
    matrix = HeatMapFigure(
        f"matrix-{mode}",
        f"{quantity.title} on each task after each task, {MODE_NAMES[mode]}",
        f"a[i][j]: {quantity.name} on the test data of task j after learning task i. The diagonal "
        f"shows what was learned; each column shows, downwards, what is retained. {spread}",
        "task j",
        "after task i",
        quantity.axis.label,
        task_heat_maps(runs, lambda record: record.result["matrix"].get(mode)),
    )
    charts = [
        LineFigure(
            f"{chart.key}-{mode}",
            f"{quantity.as_title(chart.title)}, {MODE_NAMES[mode]}",
            f"{quantity.worded(chart.caption)} {spread}",
            chart.x,
            quantity.forgetting if chart.is_forgetting else quantity.axis,
            curves(runs, mode, chart.curve),
        )
        for chart in CHARTS
    ]
    return [matrix, *charts] if runs.records[0].tasks > 1 else [matrix]


def task_heat_maps(
    runs: Runs, table_of: Callable[[RunRecord], Sequence[Sequence[float | None]] | None]
) -> tuple[HeatMap, ...]:
    """Return a heat map of tasks by tasks for each group in which a run has such a table."""
    panels = []
    for name, group in runs.groups.items():
        tables = [table for record in group if (table := table_of(record))]
        if tables:
            tasks = tuple(str(number + 1) for number in range(len(tables[0])))
            panels.append(HeatMap(name, tasks, tasks, mean_cells(tables)))
    return tuple(panels)


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


def _from_one(values: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(number), value) for number, value in enumerate(values, 1)]


# ---- Figures by round: the training loss, and the accuracy that `runs.evaluate_all` records

_ROUNDS = Axis("rounds so far, over all tasks", integer=True)
_MOST_TASKS = 10
_MOST_GROUPS = 4
Line = list[tuple[float, float]]
"""Points (rounds so far, value)."""
Rows = list[tuple[float, list[float]]]
"""Rounds so far, and the accuracies on the tasks so far."""
Recorded = TypeVar("Recorded")


Events = list[dict[str, Any]]


def round_figures(runs: Runs, modes: Sequence[str]) -> list[Figure]:
    """Return the figures for which at least one run has recorded values."""
    events = {name: [record.events for record in group] for name, group in runs.groups.items()}
    quantity, spread = quantity_of(runs), spread_note(runs)
    loss = LineFigure(
        "training-loss",
        "Training loss by round",
        "Mean over the local steps of the clients of a round, weighted as in aggregation, of the "
        f"loss that they minimize, with the terms that a method adds. {spread}",
        _ROUNDS,
        Axis("training loss", include_zero=True),
        _series(events, losses),
    )
    shown = [loss]
    for mode in modes:
        rows = {name: [accuracies(e, mode) for e in group] for name, group in events.items()}
        average = LineFigure(
            f"average-by-round-{mode}",
            f"Average {quantity.name} by round, {MODE_NAMES[mode]}",
            f"Mean {quantity.name} over the tasks so far, the current one included, within "
            f"tasks and at their ends. {spread}",
            _ROUNDS,
            quantity.axis,
            _series(rows, lambda each: [(n, sum(a) / len(a)) for n, a in each]),
        )
        shown.append(average)
        if len(events) <= _MOST_GROUPS:
            shown += [
                tasks_by_round_figure(runs, name, group, mode, number)
                for number, (name, group) in enumerate(rows.items())
            ]
    return [figure for figure in shown if figure.series]


def losses(events: Events) -> Line:
    """Return the training loss of every round that has one."""
    rounds = [event.get("loss") for event in events if event.get("event") == "round"]
    return [(float(n), loss) for n, loss in enumerate(rounds, 1) if loss is not None]


def tasks_by_round_figure(
    runs: Runs, name: str, rows: list[Rows], mode: str, number: int
) -> LineFigure:
    """Return the accuracy on each task by round, of one method."""
    tasks = max((len(values) for each in rows for _, values in each), default=0)
    step = -(-tasks // _MOST_TASKS) or 1
    lines = {
        f"task {task + 1}": [
            [(rounds, values[task]) for rounds, values in each if task < len(values)]
            for each in rows
        ]
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


def accuracies(events: Events, mode: str) -> Rows:
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


def _series(
    recorded: dict[str, list[Recorded]], line: Callable[[Recorded], Line]
) -> tuple[Series, ...]:
    shown = []
    for style, (name, group) in enumerate(recorded.items()):
        points = _same_length([line(each) for each in group])
        if points and points[0]:
            shown.append(Series(name, style, mean_line(points)))
    return tuple(shown)


def _same_length(lines: list[Line]) -> list[Line]:
    """Return the lines that are not empty, cut to the length of the shortest."""
    filled = [line for line in lines if line]
    shortest = min((len(line) for line in filled), default=0)
    return [line[:shortest] for line in filled]
