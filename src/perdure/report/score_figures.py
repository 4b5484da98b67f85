"""Figures of the metrics of `evaluate.metrics`: one matrix each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.contract.metrics import meaning
from perdure.report.accuracy import MODE_NAMES, mean_cells, spread_note
from perdure.report.figure_data import Figure, HeatMap, HeatMapFigure
from perdure.report.run_records import RunRecord, Runs


def score_figures(runs: Runs, mode: str) -> list[Figure]:
    """Return the matrix of every metric but accuracy that some run has in a mode."""
    records = [record for group in runs.groups.values() for record in group]
    names = dict.fromkeys(name for record in records for name in _scores(record))
    figures = (score_figure(runs, name, mode) for name in names if name != "accuracy")
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
        f"{meaning(name)}, on the test data of task j after learning task i. {spread_note(runs)}",
        "task j",
        "after task i",
        name,
        tuple(panels),
    )


def _scores(record: RunRecord) -> dict[str, Any]:
    return record.result.get("scores") or {}


def _tasks(group: Sequence[RunRecord]) -> tuple[str, ...]:
    return tuple(str(number + 1) for number in range(group[0].tasks))
