"""Figures of what methods recorded about themselves: spaces, routing and conflicts."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from perdure.core.errors import UserError
from perdure.report.accuracy import mean_cells, mean_line, spread_note
from perdure.report.figure_data import Axis, Figure, HeatMap, HeatMapFigure, LineFigure, Series
from perdure.report.run_records import RunRecord, Runs

_log = logging.getLogger(__name__)
Diagnosis = dict[str, Any]


@dataclass(frozen=True)
class MethodLog:
    """A run with what its method recorded in events.jsonl."""

    record: RunRecord

    @cached_property
    def lines(self) -> list[tuple[bool, Diagnosis]]:
        """Whether it is a task's end, and what was recorded; parts of a combined method apart."""
        try:
            events = list(self.record.events())
        except (UserError, OSError) as error:
            _log.warning("%s", error)
            return []
        return [
            (event.get("event") == "task", part)
            for event in events
            for part in _parts(event.get("method"))
        ]

    def used(self) -> dict[str, list[float]]:
        """The share of each layer's space in use after each task."""
        found: dict[str, list[float]] = {}
        for ends, part in self.lines:
            for layer, share in (part.get("used") or {}).items() if ends else ():
                found.setdefault(layer, []).append(share)
        return found

    def cosines(self, between: str, key: str) -> list[tuple[float, float]]:
        """A number about pairs of gradients in each round, counted from 1 over the whole run."""
        rounds = [part for ends, part in self.lines if not ends]
        seen = [(part.get(between) or {}).get(key) for part in rounds]
        return [(float(n), value) for n, value in enumerate(seen, 1) if value is not None]


def _parts(numbers: Any) -> Iterator[Diagnosis]:
    """The method's own numbers or, of a combined method, those of its parts."""
    if not isinstance(numbers, dict):
        return
    yield numbers
    for name, value in numbers.items():
        if isinstance(value, dict) and name not in ("used", "clients", "tasks", "geometry"):
            yield value


def diagnostic_figures(runs: Runs) -> list[Figure]:
    """Those figures for which some run recorded something."""
    logs = {name: [MethodLog(record) for record in group] for name, group in runs.groups.items()}
    found: list[Figure | None] = [
        space_figure(runs, logs),
        routing_figure(runs),
        confusion_figure(runs),
        conflict_figure(runs, logs, "cosine"),
        conflict_figure(runs, logs, "conflicts"),
    ]
    return [figure for figure in found if figure is not None]


def space_figure(runs: Runs, logs: dict[str, list[MethodLog]]) -> HeatMapFigure | None:
    """How full each layer's space is."""
    panels = []
    for name, group in logs.items():
        found = [used for log in group if (used := log.used())]
        if found:
            layers = tuple(found[0])
            tables = [[used[layer] for layer in layers] for used in found]
            columns = tuple(str(n + 1) for n in range(len(tables[0][0])))
            panels.append(HeatMap(name, layers, columns, mean_cells(tables)))
    return HeatMapFigure(
        "space",
        "Share of the space in use, by layer",
        "Directions that are protected for old tasks, divided by all directions of the layer's "
        f"input. At 1 nothing new can be learned there. {spread_note(runs)}",
        "after task",
        "layer",
        "share of the layer's directions",
        tuple(panels),
    ) if panels else None  # fmt: skip


def routing_figure(runs: Runs) -> HeatMapFigure | None:
    """How often the task was told rightly."""
    panels = _task_panels(runs, "routing")
    return HeatMapFigure(
        "routing",
        "Routing accuracy on each task after each task",
        "Share of task j's test examples whose task was told rightly after learning task i; no "
        f"task label was given. {spread_note(runs)}",
        "task j",
        "after task i",
        "routing accuracy (share from 0 to 1)",
        panels,
    ) if panels else None  # fmt: skip


def confusion_figure(runs: Runs) -> HeatMapFigure | None:
    """Which task was told instead."""
    panels = _task_panels(runs, "confusion")
    return HeatMapFigure(
        "confusion",
        "Routing confusion after the last task",
        "Share of task i's test examples (row) that were told to be of task j (column); every row "
        f"sums to 1, the diagonal is right. {spread_note(runs)}",
        "told to be of task j",
        "of task i",
        "share of task i's examples",
        panels,
    ) if panels else None  # fmt: skip


def conflict_figure(runs: Runs, logs: dict[str, list[MethodLog]], key: str) -> LineFigure | None:
    """What the directions of clients, and of a client's tasks, had to do with each other."""
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
            "Cosine between directions",
            Axis("mean cosine", include_zero=True, limits=(-1, 1)),
        )
        caption = "Mean cosine over all pairs of updates in a round: of clients on the server, and"
    else:
        title, axis = "Conflicting directions", Axis("share of pairs below zero", limits=(0, 1))
        caption = "Share of the pairs whose cosine is negative: of clients' updates, and"
    caption += f" of a client's present and past tasks. {spread_note(runs)}"
    return LineFigure(key, title, caption, Axis("round", integer=True), axis, tuple(series))


def _same_length(lines: Sequence[list[tuple[float, float]]]) -> list[list[tuple[float, float]]]:
    """Rounds that every run recorded: a round with one client has no pairs."""
    common = set.intersection(*({x for x, _ in line} for line in lines))
    return [[point for point in line if point[0] in common] for line in lines]


def _task_panels(runs: Runs, key: str) -> tuple[HeatMap, ...]:
    panels = []
    for name, group in runs.groups.items():
        found = [table for record in group if (table := record.result.get(key))]
        if found:
            names = tuple(str(n + 1) for n in range(len(found[0])))
            panels.append(HeatMap(name, names, names, mean_cells(found)))
    return tuple(panels)
