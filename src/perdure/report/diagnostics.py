"""Figures of what methods record while they train: subspaces, routing and conflicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from perdure.report.accuracy import mean_cells, mean_line, spread_note
from perdure.report.figure_data import Axis, Figure, HeatMap, HeatMapFigure, LineFigure, Series
from perdure.report.records import RunRecord, Runs

Diagnosis = dict[str, Any]
"""Values that a method recorded in one event."""


@dataclass(frozen=True)
class MethodLog:
    """What the method of a run recorded in events.jsonl."""

    record: RunRecord
    """The run."""

    @cached_property
    def entries(self) -> list[tuple[bool, Diagnosis]]:
        """Pairs: whether the event is the end of a task, and what the method recorded.

        A combined method has one pair per part.
        """
        return [
            (event.get("event") == "task", part)
            for event in self.record.events
            for part in _parts(event.get("method"))
        ]

    def used_fractions(self) -> dict[str, list[float]]:
        """Return, by layer, the fraction of its directions that is protected after each task."""
        by_layer: dict[str, list[float]] = {}
        for is_task_end, values in self.entries:
            for layer, fraction in (values.get("used") or {}).items() if is_task_end else ():
                by_layer.setdefault(layer, []).append(fraction)
        return by_layer

    def cosines(self, between: str, key: str) -> list[tuple[float, float]]:
        """Return the points (round, value) of a statistic on pairs of updates."""
        rounds = [values for is_task_end, values in self.entries if not is_task_end]
        statistics = [(values.get(between) or {}).get(key) for values in rounds]
        return [(float(n), value) for n, value in enumerate(statistics, 1) if value is not None]


def _parts(numbers: Any) -> Iterator[Diagnosis]:
    """Yield the values of the method and, for a combined method, those of its parts."""
    if not isinstance(numbers, dict):
        return
    yield numbers
    for name, value in numbers.items():
        if isinstance(value, dict) and name not in ("used", "clients", "tasks", "geometry"):
            yield value


def diagnostic_figures(runs: Runs) -> list[Figure]:
    """Return the figures for which at least one run has recorded values."""
    logs = {name: [MethodLog(record) for record in group] for name, group in runs.groups.items()}
    candidates: list[Figure | None] = [
        space_figure(runs, logs),
        routing_figure(runs),
        confusion_figure(runs),
        conflict_figure(runs, logs, "cosine"),
        conflict_figure(runs, logs, "conflicts"),
    ]
    return [figure for figure in candidates if figure is not None]


def space_figure(runs: Runs, logs: dict[str, list[MethodLog]]) -> HeatMapFigure | None:
    """Return the fraction of each layer's directions that is protected after each task."""
    panels = []
    for name, group in logs.items():
        by_run = [fractions for log in group if (fractions := log.used_fractions())]
        if by_run:
            layers = tuple(by_run[0])
            tables = [[fractions[layer] for layer in layers] for fractions in by_run]
            columns = tuple(str(n + 1) for n in range(len(tables[0][0])))
            panels.append(HeatMap(name, layers, columns, mean_cells(tables)))
    return HeatMapFigure(
        "space",
        "Protected fraction of each layer",
        "Number of directions that are protected for old tasks, divided by the number of all "
        "directions of the layer's input. At 1 the layer cannot learn anything new. "
        f"{spread_note(runs)}",
        "after task",
        "layer",
        "fraction of the layer's directions",
        tuple(panels),
    ) if panels else None  # fmt: skip


def routing_figure(runs: Runs) -> HeatMapFigure | None:
    """Return the fraction of examples whose task was predicted correctly."""
    panels = _task_panels(runs, "routing")
    return HeatMapFigure(
        "routing",
        "Routing accuracy on each task after each task",
        "Fraction of the test examples of task j whose task was predicted correctly after "
        f"learning task i. {spread_note(runs)}",
        "task j",
        "after task i",
        "routing accuracy (fraction from 0 to 1)",
        panels,
    ) if panels else None  # fmt: skip


def confusion_figure(runs: Runs) -> HeatMapFigure | None:
    """Return the fractions of each task's examples that were predicted to be of every task."""
    panels = _task_panels(runs, "confusion")
    return HeatMapFigure(
        "confusion",
        "Routing confusion after the last task",
        "Fraction of the test examples of task i (row) for which task j (column) was predicted. "
        "The diagonal is correct; what a row lacks to 1 was taken for examples of no known task. "
        f"{spread_note(runs)}",
        "predicted task j",
        "task i",
        "fraction of the examples of task i",
        panels,
    ) if panels else None  # fmt: skip


def conflict_figure(runs: Runs, logs: dict[str, list[MethodLog]], key: str) -> LineFigure | None:
    """Return the similarity of updates: between clients, and between the tasks of a client."""
    series = []
    for between, whose in (("clients", "clients"), ("tasks", "a client's tasks")):
        for style, (name, group) in enumerate(logs.items()):
            lines = [line for log in group if (line := log.cosines(between, key))]
            if lines:
                points = mean_line(_same_length(lines))
                series.append(Series(f"{name}, {whose}", style, points, between == "tasks"))
    if not series:
        return None
    if key == "cosine":
        title, axis = (
            "Cosine between updates",
            Axis("mean cosine", include_zero=True, limits=(-1, 1)),
        )
        caption = "Mean cosine over all pairs of updates in a round: of clients, and"
    else:
        title, axis = "Conflicting updates", Axis("fraction of pairs below zero", limits=(0, 1))
        caption = "Fraction of the pairs of updates whose cosine is negative: of clients, and"
    caption += f" of the present and past tasks of a client. {spread_note(runs)}"
    return LineFigure(key, title, caption, Axis("round", integer=True), axis, tuple(series))


def _same_length(lines: Sequence[list[tuple[float, float]]]) -> list[list[tuple[float, float]]]:
    """Return the lines restricted to the rounds that every run has values for."""
    common = set.intersection(*({x for x, _ in line} for line in lines))
    return [[point for point in line if point[0] in common] for line in lines]


def _task_panels(runs: Runs, key: str) -> tuple[HeatMap, ...]:
    panels = []
    for name, group in runs.groups.items():
        tables = [table for record in group if (table := record.result.get(key))]
        if tables:
            names = tuple(str(n + 1) for n in range(len(tables[0])))
            panels.append(HeatMap(name, names, names, mean_cells(tables)))
    return tuple(panels)
