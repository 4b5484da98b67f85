"""Bytes of task-end exchanges: none if nothing is sent."""

from __future__ import annotations

from typing import Any

import pytest

import perdure


def sent(kind: str) -> dict[str, Any]:
    values = {
        "data": {"limit": 200},
        "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
        "clients": {"count": 3},
        "model": {"hidden": [8], "head": "shared"},
        "method": {"kind": kind},
        "train": {"rounds": 2},
        "engine": {"kind": "serial"},
    }
    found: dict[str, Any] = perdure.run(values).values["bytes"]
    return found


@pytest.mark.parametrize("kind", ["stamp", "special", "er", "fedomg"])
def test_a_local_task_end_exchange_costs_the_bytes_of_fedavg(kind: str) -> None:
    plain, own = sent("fedavg"), sent(kind)
    assert (own["up"], own["down"]) == (plain["up"], plain["down"])


def test_the_task_end_exchange_of_fot_is_counted() -> None:
    plain, own = sent("fedavg"), sent("fot")
    assert own["by_field"]["up/sketch"] > 0
    assert own["by_field"]["down/params"] > plain["by_field"]["down/params"] / 2
