"""Seconds per round of a real federation on this machine, beyond training.

    python -m benchmarks federation --out federation.json

A server and three nodes on loopback with TLS and node keys, as `perdure run --engine flower` starts
them. A round lasts from one entry of events.jsonl to the next; the first is not counted, because
nodes are still starting. Training is the time of the serial engine for the same round: on this
machine all nodes share the cores, so they need at least as long. The second model has 45 MB and
takes one local step, so that its round is mostly communication.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

from perdure.config import parse
from perdure.runs.run import run
from perdure.training.experiment import build_experiment

ROUNDS = 5
BASE: dict[str, Any] = {
    "data": {"source": "digits"},
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 3},
    "device": "cpu",
}
WORK: dict[str, dict[str, Any]] = {
    "small": {
        "model": {"kind": "mlp", "hidden": [100, 100]},
        "train": {"rounds": ROUNDS, "batch_size": 16},
    },
    "45 MB": {
        "model": {"kind": "mlp", "hidden": [3330, 3330]},
        "train": {"rounds": ROUNDS, "batch_size": 16, "max_steps": 1},
    },
}
BOUNDS = {"small": 12.0, "45 MB": 12.0}


def main() -> dict[str, Any]:
    """Return the seconds per round of both models."""
    found = {name: _measure(BASE | work) for name, work in WORK.items()}
    return {
        "benchmark": "federation",
        "statistic": f"median of {ROUNDS - 1} rounds",
        "nodes": 3,
        "runs": found,
        "bounds_beyond_training": BOUNDS,
        "met": all(found[name]["beyond_training"] <= bound for name, bound in BOUNDS.items()),
    }


def _measure(config: dict[str, Any]) -> dict[str, Any]:
    params = build_experiment(parse(config)).initial_state().server.params
    seconds = {kind: _round_seconds(config, kind) for kind in ("serial", "flower")}
    typical = {kind: statistics.median(values) for kind, values in seconds.items()}
    return {
        "model_mb": round(sum(value.nbytes for value in params.values()) / 1e6, 1),
        "round": round(typical["flower"], 2),
        "slowest_round": round(max(seconds["flower"]), 2),
        "training": round(typical["serial"], 2),
        "beyond_training": round(typical["flower"] - typical["serial"], 2),
    }


def _round_seconds(config: dict[str, Any], engine: str) -> list[float]:
    ends: list[float] = []

    def watch(state: Any, event: dict[str, Any]) -> None:
        if event["event"] == "round":
            ends.append(time.perf_counter())

    run(config | {"engine": {"kind": engine}}, watch=watch)
    return [later - earlier for earlier, later in pairwise(ends)]
