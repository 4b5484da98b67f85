"""The section on tasks: their names and classes."""

from __future__ import annotations

from perdure.report.figure_html import scrollable
from perdure.report.markup import Html, el
from perdure.report.run_records import Runs

_MOST = 20
"""Classes of a task that are named."""


def task_table(runs: Runs) -> list[Html]:
    """Return the names and classes of the tasks; empty if no run has recorded them."""
    records = [record for record in runs.records if record.result.get("task_names")]
    if not records:
        return []
    first = records[0].result
    head = el("tr", *(el("th", name) for name in ("task", "name", "classes")))
    rows = (
        el("tr", el("th", str(number), scope="row"), el("td", name), el("td", _shown(classes)))
        for number, (name, classes) in enumerate(
            zip(first["task_names"], first["task_classes"], strict=True), 1
        )
    )
    made = el("table", el("thead", head), el("tbody", *rows))
    differ = any(record.result["task_classes"] != first["task_classes"] for record in records)
    note = f"Tasks of seed {first['seed']}; other runs have other ones." if differ else ""
    return [*([el("p", note, class_="note")] if note else []), scrollable(made, "tasks")]


def _shown(classes: list[str]) -> str:
    more = f", and {len(classes) - _MOST} more" if len(classes) > _MOST else ""
    return ", ".join(classes[:_MOST]) + more
