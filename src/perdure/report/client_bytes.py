"""The table of the bytes per client: by field and task, and what clients keep on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from perdure.report.comparison_text import format_bytes
from perdure.report.figure_html import table
from perdure.report.markup import Html, el
from perdure.report.run_records import RunRecord, Runs

_NONE = "\u2013"
_ABOUT = (
    "Bytes per client, by field and task: means over the clients that took part in the task, and "
    "the client with most. Kept: what a client stores after each task, over all clients. Means "
    "over seeds."
)
TaskBytes = Callable[[dict[str, Any]], float | None]
"""Returns a number of bytes, given the entry of one task in a result."""


def client_bytes(runs: Runs) -> list[Html]:
    """Return the table."""
    rows = [row for name, group in runs.groups.items() for row in _rows(name, group)]
    tasks = [f"task {task + 1}" for task in range(runs.records[0].tasks)]
    return [
        el("h4", "Bytes per client"), el("p", _ABOUT, class_="note"),
        table(["method", "what", *tasks], rows, words=2),
    ]  # fmt: skip


def _rows(name: str, group: Sequence[RunRecord]) -> list[list[str]]:
    counted = [record.result["bytes"]["by_task"] for record in group]
    fields = dict.fromkeys(key for tasks in counted for task in tasks for key in task["by_field"])
    rows = [(f"{field} (mean)", _mean_of(field)) for field in fields]
    rows += [
        (f"{direction}, all fields ({what})", _total(direction, what))
        for direction in ("up", "down")
        for what in ("mean", "max")
    ]
    shown = [[name, what, *_cells(counted, value)] for what, value in rows]
    kept = [tasks for record in group if (tasks := _kept(record))]
    return shown + [
        [name, f"kept ({what})", *_cells(kept, _stored(what))] for what in ("mean", "max") if kept
    ]


def _kept(record: RunRecord) -> list[dict[str, Any]] | None:
    """Return what clients keep after each task, or None if some of it was not counted."""
    by_task = (record.result["bytes"]["kept"] or {}).get("by_task") or []
    return by_task if all(by_task) else None


def _mean_of(field: str) -> TaskBytes:
    def value(task: dict[str, Any]) -> float | None:
        count = task["by_field"].get(field)
        return None if count is None else count / max(1, task["per_client"]["clients"])

    return value


def _total(direction: str, what: str) -> TaskBytes:
    return lambda task: float(task["per_client"][direction][what])


def _stored(what: str) -> TaskBytes:
    return lambda task: float(task[what])


def _cells(runs: list[list[dict[str, Any]]], value: TaskBytes) -> list[str]:
    """Return one cell per task: the mean over the runs."""
    columns = ([value(task) for task in tasks] for tasks in zip(*runs, strict=True))
    return [_cell([number for number in column if number is not None]) for column in columns]


def _cell(numbers: list[float]) -> str:
    return format_bytes(fmean(numbers)) if numbers else _NONE
