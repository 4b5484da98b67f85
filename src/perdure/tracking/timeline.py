"""Events as named numbers over rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Timeline:
    """Turns events, taken in order, into points; counts rounds and bytes along the way."""

    def __init__(self) -> None:
        self._rounds = 0
        self._earlier = {"up": 0, "down": 0}

    def take(self, event: dict[str, Any]) -> tuple[int, dict[str, float]]:
        """The rounds done so far, and the values after them.

        >>> Timeline().take({"event": "round", "lr": 0.1, "bytes": {"up": 3, "down": 4}})
        (1, {'lr': 0.1, 'bytes/up': 3.0, 'bytes/down': 4.0})
        """
        ends = event["event"] == "task"
        self._rounds += not ends
        values = _task(event) if ends else _round(event)
        in_all = {way: self._earlier[way] + event["bytes"][way] for way in ("up", "down")}
        values |= {f"bytes/{way}": float(count) for way, count in in_all.items()}
        if ends:
            self._earlier = in_all
        return self._rounds, values | dict(_numbers(event.get("method") or {}, "method"))


def _round(event: dict[str, Any]) -> dict[str, float]:
    found = {"lr": event.get("lr"), "clients": event.get("clients")}
    for mode, value in (event.get("accuracy") or {}).items():
        found[f"{mode}/current"] = value
    return {key: float(value) for key, value in found.items() if value is not None}


def _task(event: dict[str, Any]) -> dict[str, float]:
    """Accuracy on each task so far and their mean, by mode; how often the task was told rightly."""
    found: dict[str, float] = {}
    for mode, row in [*event["accuracy"].items(), ("routing", event.get("routing") or [])]:
        values = [value for value in row if value is not None]
        if values:
            found[f"{mode}/mean"] = sum(values) / len(values)
        found |= {f"{mode}/task_{j + 1}": float(v) for j, v in enumerate(row) if v is not None}
    return found


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every number inside a method's diagnostics, by its path."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _numbers(part, f"{name}/{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
