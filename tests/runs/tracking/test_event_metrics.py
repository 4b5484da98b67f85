"""Metric values of events."""

from __future__ import annotations

import pytest

from perdure.runs.tracking.event_metrics import EventMetrics


def test_rounds_and_bytes_are_counted_over_tasks() -> None:
    metrics = EventMetrics()
    first = {"event": "round", "lr": 0.1, "clients": 3, "bytes": {"up": 5, "down": 6}}
    end = {
        "event": "task",
        "accuracy": {"task_agnostic": [0.5, 1.0, None], "routed": [None, None, None]},
        "routing": [None, None, None],
        "bytes": {"up": 7, "down": 8},
        "method": {"space": {"layer.0": 0.25}, "kind": "text", "flag": True, "count": 2},
    }
    assert metrics.extract(first) == (
        1,
        {"lr": 0.1, "clients": 3.0, "bytes/up": 5.0, "bytes/down": 6.0},
    )
    step, values = metrics.extract(end)
    assert step == 1
    assert values == {
        "task_agnostic/mean": 0.75,
        "task_agnostic/task_1": 0.5,
        "task_agnostic/task_2": 1.0,
        "bytes/up": 7.0,
        "bytes/down": 8.0,
        "method/space/layer.0": 0.25,
        "method/count": 2.0,
    }
    step, values = metrics.extract({**first, "accuracy": {"task_aware": 0.5, "routed": None}})
    assert step == 2
    assert values["bytes/up"] == 12.0
    assert values["task_aware/current"] == pytest.approx(0.5)
    assert "routed/current" not in values
