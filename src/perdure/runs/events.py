"""The lines of events.jsonl."""

from __future__ import annotations

import json
from typing import Any

Event = dict[str, Any]


def event_of(line: bytes) -> Event | None:
    """The event of a line; None: it is none."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def is_progress(event: Event | None) -> bool:
    """Whether it is a round or a task's end, with the bytes so far."""
    if event is None or not isinstance(event.get("bytes"), dict):
        return False
    return event.get("event") in ("round", "task")
