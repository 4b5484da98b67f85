"""The table of rounds in which each client of a federation took part."""

from __future__ import annotations

from collections.abc import Mapping

from perdure.report.figure_html import table
from perdure.report.markup import Html, el
from perdure.report.run_records import RunRecord, Runs

_ABOUT = (
    "Training rounds in which each client of a federation was sampled, its update counted, and it "
    "failed: without a reply, or with one that could not be used. A round continues without "
    "clients that fail if enough of them are left (federation.quorum)."
)
_COLUMNS = ("sampled", "counted", "failed")


def participation(runs: Runs) -> list[Html]:
    """Return the table; empty if no run was a federation that counted it."""
    rows = [
        row
        for name, group in runs.groups.items()
        for record in group
        for row in _rows(name, record)
    ]
    if not rows:
        return []
    head = ["run", "client", *(f"rounds {name}" for name in _COLUMNS)]
    return [
        el("h3", "Participation"), el("p", _ABOUT, class_="note"), table(head, rows, words=2),
    ]  # fmt: skip


def _rows(name: str, record: RunRecord) -> list[list[str]]:
    counts: Mapping[str, Mapping[str, int]] = record.result.get("participation") or {}
    clients = sorted(counts, key=lambda client: (len(client), client))
    run = f"{name}, seed {record.seed}"
    return [
        [run, client, *(str(counts[client].get(column, 0)) for column in _COLUMNS)]
        for client in clients
    ]
