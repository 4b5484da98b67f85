"""Metric values of events, by name and round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perdure.core.event_log import Event, EventTotals


class EventMetrics:
    """Turns the events of a run, in their order, into metric values."""

    def __init__(self) -> None:
        self._totals = EventTotals()

    def extract(self, event: Event) -> tuple[int, dict[str, float]]:
        """Return the number of finished rounds and the metric values of an event.

        Example:
            >>> EventMetrics().extract({"event": "round", "lr": 0.1, "bytes": {"up": 3, "down": 4}})
            (1, {'lr': 0.1, 'bytes/up': 3.0, 'bytes/down': 4.0})
        """
        self._totals.add(event)
        values = _task_values(event) if event["event"] == "task" else _round_values(event)
        values |= {f"bytes/{way}": float(count) for way, count in self._totals.bytes.items()}
        values |= dict(_numbers(event.get("method") or {}, "method"))
        return self._totals.rounds, values


def _round_values(event: Event) -> dict[str, float]:
    values = {key: event.get(key) for key in ("lr", "clients", "loss")}
    for mode, accuracy in (event.get("accuracy") or {}).items():
        values[f"{mode}/current"] = accuracy
    for mode, accuracies in (event.get("accuracies") or {}).items():
        values |= {f"{mode}/task_{j + 1}": value for j, value in enumerate(accuracies)}
    return {key: float(value) for key, value in values.items() if value is not None}


def _task_values(event: Event) -> dict[str, float]:
    """Return accuracy, scores and routing accuracy on every task so far, and their means."""
    values: dict[str, float] = {}
    rows = [*event["accuracy"].items(), ("routing", event.get("routing") or [])]
    for name, by_mode in (event.get("scores") or {}).items():
        rows += [(f"scores/{name}/{mode}", row) for mode, row in by_mode.items()]
    for mode, row in rows:
        so_far = [value for value in row if value is not None]
        if so_far:
            values[f"{mode}/mean"] = sum(so_far) / len(so_far)
        values |= {f"{mode}/task_{j + 1}": float(v) for j, v in enumerate(row) if v is not None}
    return values


def _numbers(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield every number in a method's diagnostics, with its path as name."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}/{key}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
