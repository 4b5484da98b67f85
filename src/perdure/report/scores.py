"""Figures of single metrics and clients, of costs, and of sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from perdure.evaluation.metrics import MAIN, meaning
from perdure.report.accuracy import (
    MODE_NAMES,
    average_accuracies,
    mean_line,
    shown_modes,
    spread_note,
    task_heat_maps,
)
from perdure.report.figure_data import (
    Axis,
    Figure,
    HeatMap,
    HeatMapFigure,
    LineFigure,
    Point,
    Series,
    quantity_of,
    summarize_seeds,
)
from perdure.report.figure_html import Html, el, figure_html
from perdure.report.records import RunRecord, Runs, differing_settings
from perdure.report.tables import byte_unit

# ---- Figures of the metrics of `evaluate.metrics`: one matrix each


def score_figures(runs: Runs, mode: str) -> list[Figure]:
    """Return the matrix of every metric but the main one that some run has in a mode."""
    records = [record for group in runs.groups.values() for record in group]
    names = dict.fromkeys(name for record in records for name in record.result.get("scores") or {})
    figures = (score_figure(runs, name, mode) for name in names if name not in MAIN.values())
    return [figure for figure in figures if figure.panels]


def score_figure(runs: Runs, name: str, mode: str) -> HeatMapFigure:
    """Return one heat map per method: a metric on every task after every task."""
    panels = task_heat_maps(
        runs, lambda record: (record.result.get("scores") or {}).get(name, {}).get(mode)
    )
    return HeatMapFigure(
        f"{name.replace('.', '-')}-{mode}",
        f"{name} on each task after each task, {MODE_NAMES[mode]}",
        f"{definition(runs, name)}, on the test data of task j after learning task i. "
        f"{spread_note(runs)}",
        "task j",
        "after task i",
        name,
        panels,
        color_limits(name, panels),
    )


def definition(runs: Runs, name: str) -> str:
    """Return the definition of a metric, as a run recorded it or else that of the built-in one."""
    recorded = (record.result.get("score_definitions") or {} for record in runs.records)
    return next((known[name] for known in recorded if name in known), meaning(name))


def color_limits(name: str, panels: Sequence[HeatMap]) -> tuple[float, float]:
    """Return the values with the lightest and darkest color: 0 and 1, or beyond if some are.

    R2 below 0 is as light as 0.
    """
    cells = [cell.mean for panel in panels for row in panel.cells for cell in row if cell]
    if name == "r2" or not cells:
        return (0.0, 1.0)
    return (min(0.0, *cells), max(1.0, *cells))


# ---- Figures of the scores of single clients, after the last task

ClientScores = list[dict[str, Any]]
"""`client_scores` of a result.json: by task, client, metric and mode."""


def client_scores(runs: Runs) -> list[Html]:
    """Return the figures of all metrics and modes; empty if no client was scored."""
    figures = [f for mode in shown_modes(runs) for f in client_figures(runs, mode)]
    return [el("div", *map(figure_html, figures), class_="figures")] if figures else []


def client_figures(runs: Runs, mode: str) -> list[HeatMapFigure]:
    """Return one figure per metric that single clients have in a mode."""
    tasks = [task for record in runs.records for task in _scores(record)]
    names = dict.fromkeys(name for task in tasks for scores in task.values() for name in scores)
    figures = (client_figure(runs, name, mode) for name in names)
    return [figure for figure in figures if figure.panels]


def client_figure(runs: Runs, name: str, mode: str) -> HeatMapFigure:
    """Return one heat map per method: a metric of every client on every task at the end."""
    panels = [_panel(label, group, name, mode) for label, group in runs.groups.items()]
    known = tuple(panel for panel in panels if any(any(row) for row in panel.cells))
    return HeatMapFigure(
        f"client-{name.replace('.', '-')}-{mode}",
        f"{name} of each client, {MODE_NAMES[mode]}",
        f"{definition(runs, name)}, on the test data of the client (or by its model) in task j, "
        f"after the last task. {spread_note(runs)}",
        "task j",
        "client",
        name,
        known,
        color_limits(name, known),
    )


def _panel(label: str, group: Sequence[RunRecord], name: str, mode: str) -> HeatMap:
    tasks, clients = range(group[0].tasks), _clients(group)
    cells = tuple(
        tuple(summarize_seeds([_value(r, task, c, name, mode) for r in group]) for task in tasks)
        for c in clients
    )
    columns = tuple(str(task + 1) for task in tasks)
    return HeatMap(label, tuple(_client_name(group[0], c) for c in clients), columns, cells)


def _clients(group: Sequence[RunRecord]) -> list[str]:
    """Return the scored clients of some runs, by their number."""
    found = {client for record in group for task in _scores(record) for client in task}
    return sorted(found, key=int)


def _client_name(record: RunRecord, client: str) -> str:
    names = (record.result.get("clients") or {}).get("names")
    return str(names[int(client)]) if names else str(int(client) + 1)


def _value(record: RunRecord, task: int, client: str, name: str, mode: str) -> float | None:
    tasks = _scores(record)
    by_client: dict[str, Any] = tasks[task] if task < len(tasks) else {}
    value: float | None = by_client.get(client, {}).get(name, {}).get(mode)
    return value


def _scores(record: RunRecord) -> ClientScores:
    return record.result.get("client_scores") or []


# ---- Figures of accuracy against its cost in bytes and seconds

Cost = Callable[[RunRecord], list[float]]
"""Returns the cumulative cost of a run at the end of each task."""


def cost_figures(runs: Runs, mode: str) -> list[LineFigure]:
    """Return the figures of A_t against transferred bytes and against seconds."""
    largest = max(max(cumulative_bytes(record), default=0) for record in runs.records)
    divisor, unit = byte_unit(largest)
    costs: list[tuple[str, str, str, Cost]] = [
        (
            "bytes", f"uploads and downloads of all clients ({unit})",
            "Size of the encoded messages of all clients, in both directions.",
            lambda record: [value / divisor for value in cumulative_bytes(record)],
        ),
        (
            "seconds", "wall-clock time (s)",
            "Training, consolidation and evaluation. Comparable only between runs on one "
            "machine under equal load.",
            lambda record: list(accumulate(record.result["seconds"]["by_task"])),
        ),
    ]  # fmt: skip
    quantity, figures = quantity_of(runs), []
    for what, axis, note, cost in costs:
        series = []
        for style, (name, group) in enumerate(runs.groups.items()):
            lines = [
                list(zip(cost(record), (y for _, y in average_accuracies(matrix)), strict=True))
                for record in group
                if (matrix := record.result["matrix"].get(mode)) and cost(record)
            ]
            if lines:
                series.append(Series(name, style, mean_line(lines)))
        figure = LineFigure(
            f"{what}-{mode}",
            f"Average {quantity.name} against {what}, {MODE_NAMES[mode]}",
            f"A_t (mean {quantity.name} over the tasks so far) after each task; one marker "
            f"per task. {note} {spread_note(runs)}",
            Axis(axis, include_zero=True),
            quantity.axis,
            tuple(series),
        )
        figures.append(figure)
    return figures


def cumulative_bytes(record: RunRecord) -> list[float]:
    """Return the bytes sent up and down until the end of each task."""
    by_task = record.result["bytes"]["by_task"]
    return list(accumulate(float(task["up"] + task["down"]) for task in by_task))


# ---- Figures of sweeps: a metric over the values of a key, one line per method

_METRICS = ("ACC", "FGT")
_METHOD = ("method.kind", "stream.cumulative")
"""Keys that make another method of it, such as joint training."""
Group = tuple[RunRecord, ...]
"""Runs that differ only in their seed."""


def sweep_figures(runs: Runs, mode: str) -> list[Figure]:
    """Return ACC and FGT over the values of every key that was swept; empty without a sweep."""
    groups = list(runs.groups.values())
    figures = [
        _sweep_figure(runs, groups, key, metric, mode)
        for key in swept_keys(groups)
        for metric in _METRICS
    ]
    return [figure for figure in figures if figure.series]


def swept_keys(groups: Sequence[Group]) -> list[str]:
    """Return the keys in which two groups of runs differ that agree in everything else."""
    differing = differing_settings([group[0] for group in groups])
    chosen = [key for key in differing if key not in _METHOD and not _is_engine(key)]
    return [key for key in chosen if any(len(line) > 1 for line in _lines(groups, key))]


def _lines(groups: Sequence[Group], key: str) -> list[list[Group]]:
    """Return the groups that agree in everything but a key, in lists."""
    lines: dict[str, list[Group]] = {}
    for group in groups:
        same = {k: v for k, v in group[0].settings.items() if k != key and not _is_engine(k)}
        if group[0].setting(key) is not None:
            lines.setdefault(repr(sorted(same.items())), []).append(group)
    return list(lines.values())


def _is_engine(key: str) -> bool:
    return key.startswith("engine.")


def _sweep_figure(
    runs: Runs, groups: Sequence[Group], key: str, metric: str, mode: str
) -> LineFigure:  # fmt: skip
    lines = [line for line in _lines(groups, key) if len(line) > 1]
    values = _in_order([group[0].setting(key) for line in lines for group in line])
    names = _names([line[0][0] for line in lines], key)
    series = [
        Series(name, style, points)
        for style, (name, line) in enumerate(zip(names, lines, strict=True))
        if (points := _points(line, key, values, metric, mode))
    ]
    short, quantity = key.removeprefix("method."), quantity_of(runs)
    return LineFigure(
        f"sweep-{key.replace('.', '-')}-{metric}-{mode}",
        f"{metric} by {short}, {MODE_NAMES[mode]}",
        f"{metric}: {quantity.definitions[metric]}. The values of {key} are evenly spaced. "
        f"{spread_note(runs)}",
        Axis(key, integer=True, names=tuple(str(value) for value in values)),
        quantity.axis if metric == "ACC" else quantity.forgetting,
        tuple(series),
    )


def _points(
    line: Sequence[Group], key: str, values: Sequence[Any], metric: str, mode: str
) -> tuple[Point, ...]:
    points = []
    for group in line:
        metrics = [record.result["metrics"].get(mode) or {} for record in group]
        cell = summarize_seeds([each.get(metric) for each in metrics])
        if cell is not None:
            points.append(Point(float(values.index(group[0].setting(key))), cell))
    return tuple(sorted(points, key=lambda point: point.x))


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Return different values, numbers by size and others as they come."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    are_numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in different)
    return sorted(different) if are_numbers else different


def _names(records: Sequence[RunRecord], key: str) -> list[str]:
    """Return the kind of each line's method, with the settings in which lines of a kind differ."""
    names = []
    for record in records:
        alike = [other for other in records if other.kind == record.kind]
        changed = (
            f"{k.removeprefix('method.')}={record.setting(k)}"
            for k in differing_settings(alike)
            if k != key and not _is_engine(k)
        )
        names.append(" ".join([record.kind, *changed]))
    return names
