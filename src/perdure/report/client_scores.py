"""Figures of the scores of single clients, after the last task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.report.accuracy import MODE_NAMES, shown_modes, spread_note
from perdure.report.figure_data import HeatMap, HeatMapFigure, summarize_seeds
from perdure.report.figure_html import figure_html
from perdure.report.markup import Html, el
from perdure.report.run_records import RunRecord, Runs
from perdure.report.score_figures import color_limits, definition

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
