"""The table of what has left a node, for perdure federation node --show."""

from __future__ import annotations

from dataclasses import asdict

from perdure.cli.console import print_json, stdout_console
from perdure.cli.tables import text_table
from perdure.flower.release_log import ReleaseLog, summarize


def show_released(log: ReleaseLog, as_json: bool) -> None:
    """Print what has left a node: one row per run, task and kind of request.

    Args:
        log: The node's log.
        as_json: Print JSON.
    """
    rows = summarize(log.entries())
    if as_json:
        print_json([asdict(row) for row in rows])
    elif not rows:
        stdout_console().print("nothing has left this node")
    else:
        heads = ["run", "task", "request", "replies", "repeated", "bytes", "fields", "protection"]
        cells = [
            [r.run[:8], r.task + 1, r.kind, r.replies, r.repeated, r.bytes, r.fields, r.protection]
            for r in rows
        ]
        rows_of_text = [[str(cell) for cell in row] for row in cells]
        stdout_console().print(text_table(heads, rows_of_text))
