"""Seconds per round of each method relative to FedAvg, on the same clients.

    python -m benchmarks methods --out methods.json

Rounds of all methods take turns in their second task, where a method uses its state of the first
one; the result is the median of the ratios within a turn.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

from benchmarks.turns import median_ratio, timed_turns
from perdure.config import parse
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task, end_task, evaluate
from perdure.training.round import train_round
from perdure.training.state import RunState

BOUNDS = {
    "mlp": {"special": 1.02, "fedomg": 1.15, "stamp": 2.0, "fot": 1.05, "fedprotip": 1.25},
    "conv": {"fedprotip": 1.35},
}
UNBOUNDED = ("gpm",)  # projects as FOT does, with bases of each client
WARM_UP = 3  # rounds that trace
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"kind": "mlp", "hidden": [100, 100]},
    "conv": {"kind": "conv"},
}


def at_second_task(kind: str, model: str, rounds: int) -> tuple[Experiment, RunState]:
    """Return a run at the start of its second task."""
    values = {
        "stream": {"kind": "permuted", "tasks": 2},
        "clients": {"count": 10, "partition": {"kind": "dirichlet", "alpha": 0.5}},
        "model": MODELS[model],
        "method": {"kind": kind},
        "train": {"rounds": rounds, "local_epochs": 2, "batch_size": 16, "lr": 0.05},
        "engine": {"kind": "vector"},
    }
    experiment = build_experiment(parse(values))
    state = experiment.initial_state()
    begin_task(experiment, state)
    for _ in range(3):
        train_round(experiment, state)
    state.round = rounds  # where a task ends
    end_task(experiment, state)
    evaluate(experiment, state)
    state.task, state.round = 1, 0
    begin_task(experiment, state)
    return experiment, state


def measure(model: str, repeats: int) -> dict[str, Any]:
    """Return the ratios of all methods on one model."""
    bounds = BOUNDS[model]
    kinds = ["fedavg", *bounds, *UNBOUNDED]
    runs = {kind: at_second_task(kind, model, repeats + WARM_UP) for kind in kinds}
    rounds = {kind: partial(train_round, *run) for kind, run in runs.items()}
    seconds = timed_turns(rounds, repeats, WARM_UP)
    ratios = {kind: round(median_ratio(seconds[kind], seconds["fedavg"]), 3) for kind in kinds[1:]}
    medians = {kind: round(statistics.median(seconds[kind]), 5) for kind in kinds}
    return {
        "model": model,
        "median_seconds_per_round": medians,
        "ratio_to_fedavg": ratios,
        "bounds": bounds,
        "met": {kind: ratios[kind] <= bound for kind, bound in bounds.items()},
    }


def main(repeats: int = 120) -> dict[str, Any]:
    """Return the rows of both models."""
    return {
        "benchmark": "methods",
        "statistic": f"median over {repeats} turns of the ratio within a turn",
        "rows": [measure(model, repeats) for model in BOUNDS],
    }
