"""Reading events.jsonl, also while another process writes it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perdure.core.documents import is_count, is_number, json_value
from perdure.core.errors import UserError

Event = dict[str, Any]
"""What a run reports, as JSON values. `event["event"]` is "round", "task" or, while uploads arrive,
"clients"; `perdure.training.events` makes them."""
EVENTS = "events.jsonl"
"""The file with the events, in a run directory."""
_MAX_TASKS = 1_000_000


def parse_event(line: bytes) -> Event | None:
    """Return the event of a line, or None if the line is not a JSON object."""
    try:
        event = json_value(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def read_events(path: Path) -> list[Event]:
    """Return all events of a file; none if it does not exist. An incomplete last line is left out.

    Raises:
        UserError: A line is not an event.

    """
    if not path.is_file():
        return []
    events = [parse_event(line) for line in path.read_bytes().split(b"\n")[:-1]]
    if None in events:
        raise UserError(f"{path}: line {events.index(None) + 1} is not an event")
    return [event for event in events if event is not None]


def progress_events(lines: Iterable[bytes]) -> list[Event]:
    """Return the events of finished rounds and tasks; other and altered lines are skipped."""
    events = map(parse_event, lines)
    return [event for event in events if event is not None and is_progress(event)]


def is_progress(event: Event) -> bool:
    """Return whether an event is a finished round or task, and has what the loop writes."""
    sent = event.get("bytes")
    has_bytes = isinstance(sent, dict) and all(is_count(sent.get(way)) for way in ("up", "down"))
    if not has_bytes or not is_count(event.get("task"), _MAX_TASKS):
        return False
    if event.get("event") == "round":
        return is_count(event.get("round", 0))
    is_valid = "accuracy" not in event or _has_accuracy(event["accuracy"])
    return event.get("event") == "task" and is_valid


def _has_accuracy(rows: Any) -> bool:
    """Return whether rows are accuracies by mode, of which that without task labels is needed."""
    if not isinstance(rows, dict) or not any(is_number(v) for v in _row(rows, "task_agnostic")):
        return False
    return rows.get("routed") is None or bool(_row(rows, "routed"))


def _row(rows: dict[str, Any], mode: str) -> list[Any]:
    """Return the accuracies of a mode; nothing if they are not numbers and None."""
    row = rows.get(mode)
    if not isinstance(row, list) or len(row) > _MAX_TASKS:
        return []
    return row if all(value is None or is_number(value) for value in row) else []


class LineReader:
    """Reads the lines that another process appends to a file, complete lines only."""

    def __init__(self, path: Path, from_end: bool = False) -> None:
        self._path = path
        self._offset = self._size() if from_end else 0
        self.was_truncated = False
        """Whether the last `read_new` found the file shortened and read it from its start."""

    def read_new(self) -> list[bytes]:
        """Return the lines since the last call.

        A run that is resumed from an earlier checkpoint shortens its files. Then all lines of the
        file are returned, and `was_truncated` is True.
        """
        size = self._size()
        self.was_truncated = size < self._offset
        if self.was_truncated:
            self._offset = 0
        if size == self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0


class EventTotals:
    """Rounds and bytes since the start of a run, summed over its events."""

    def __init__(self) -> None:
        self.rounds = 0
        """Finished rounds, over all tasks."""
        self.bytes = {"up": 0, "down": 0}
        """Bytes so far, over all tasks. (An event contains those of its task so far.)"""
        self._earlier_tasks = {"up": 0, "down": 0}

    def add(self, event: Event) -> None:
        """Add the next event of a finished round or task."""
        self.bytes = {way: self._earlier_tasks[way] + event["bytes"][way] for way in ("up", "down")}
        if event["event"] == "task":
            self._earlier_tasks = self.bytes
        else:
            self.rounds += 1
