"""Figures of what methods record while they train: subspaces, routing and conflicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from perdure.report.accuracy import mean_cells, mean_line, spread_note, task_heat_maps
from perdure.report.figure_data import Axis, Figure, HeatMap, HeatMapFigure, LineFigure, Series
from perdure.report.records import RunRecord, Runs

Diagnosis = dict[str, Any]
"""Values that a method recorded in one event."""
_VALUES = ("used", "clients", "tasks", "geometry")
"""Keys of a method's values that are dicts; the others are parts of a combined method."""


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
        pairs: list[tuple[bool, Diagnosis]] = []
        for event in self.record.events:
            numbers, is_task_end = event.get("method"), event.get("event") == "task"
            if isinstance(numbers, dict):
                pairs.append((is_task_end, numbers))
                pairs += [
                    (is_task_end, part)
                    for name, part in numbers.items()
                    if isinstance(part, dict) and name not in _VALUES
                ]
        return pairs

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


def diagnostic_figures(runs: Runs) -> list[Figure]:
    """Return the figures for which at least one run has recorded values."""
    logs = {name: [MethodLog(record) for record in group] for name, group in runs.groups.items()}
    routing = HeatMapFigure(
        "routing",
        "Routing accuracy on each task after each task",
        "Fraction of the test examples of task j whose task was predicted correctly after "
        f"learning task i. {spread_note(runs)}",
        "task j",
        "after task i",
        "routing accuracy (fraction from 0 to 1)",
        task_heat_maps(runs, lambda record: record.result.get("routing")),
    )
    confusion = HeatMapFigure(
        "confusion",
        "Routing confusion after the last task",
        "Fraction of the test examples of task i (row) for which task j (column) was predicted. "
        "The diagonal is correct; what a row lacks to 1 was taken for examples of no known task. "
        f"{spread_note(runs)}",
        "predicted task j",
        "task i",
        "fraction of the examples of task i",
        task_heat_maps(runs, lambda record: record.result.get("confusion")),
    )
    candidates: list[Figure | None] = [
        space_figure(runs, logs),
        routing if routing.panels else None,
        confusion if confusion.panels else None,
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
