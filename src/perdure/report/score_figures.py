"""Figures of the metrics of `evaluate.metrics`: one matrix each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.contract.metrics import MAIN, meaning
from perdure.report.accuracy import MODE_NAMES, mean_cells, spread_note
from perdure.report.figure_data import Figure, HeatMap, HeatMapFigure
from perdure.report.run_records import RunRecord, Runs


def score_figures(runs: Runs, mode: str) -> list[Figure]:
    """Return the matrix of every metric but the main one that some run has in a mode."""
    records = [record for group in runs.groups.values() for record in group]
    names = dict.fromkeys(name for record in records for name in _scores(record))
    figures = (score_figure(runs, name, mode) for name in names if name not in MAIN.values())
    return [figure for figure in figures if figure.panels]


def score_figure(runs: Runs, name: str, mode: str) -> HeatMapFigure:
    """Return one heat map per method: a metric on every task after every task."""
    panels = []
    for label, group in runs.groups.items():
        tables = [table for record in group if (table := _scores(record).get(name, {}).get(mode))]
        if tables:
            panels.append(HeatMap(label, _tasks(group), _tasks(group), mean_cells(tables)))
    return HeatMapFigure(
        f"{name.replace('.', '-')}-{mode}",
        f"{name} on each task after each task, {MODE_NAMES[mode]}",
        f"{definition(runs, name)}, on the test data of task j after learning task i. "
        f"{spread_note(runs)}",
        "task j",
        "after task i",
        name,
        tuple(panels),
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


def _scores(record: RunRecord) -> dict[str, Any]:
    return record.result.get("scores") or {}


def _tasks(group: Sequence[RunRecord]) -> tuple[str, ...]:
    return tuple(str(number + 1) for number in range(group[0].tasks))
