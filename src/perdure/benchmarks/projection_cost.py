"""Processor time per round of the projection methods, relative to FedAvg.

    perdure bench projection_cost --out projection_cost.json

Every method starts its second task with half of each layer's input space protected. Rounds of the
methods take turns, and the result is the best processor time of each, so that a busy machine
affects all of them.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import torch

from perdure.algebra.subspaces import Subspace
from perdure.config import parse
from perdure.methods.gpm import LocalBases
from perdure.methods.parts.protected_layers import layers_shared_by_tasks
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task
from perdure.training.rounds import train_round
from perdure.training.state import RunState

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"kind": "mlp", "hidden": [100, 100]},
    "conv": {"kind": "conv", "width": 16},
}
METHODS = ("fedavg", "fot", "fedprotip", "gpm")


def at_second_task(model: str, method: str, engine: str) -> tuple[Experiment, RunState]:
    """Return an experiment about to train its second task with half of every space protected."""
    config = parse(
        {
            "stream": {"tasks": 2},
            "clients": {"count": 10, "partition": {"kind": "dirichlet", "alpha": 0.5}},
            "model": MODELS[model],
            "method": {"kind": method},
            "train": {"rounds": 1000, "local_epochs": 2, "batch_size": 16, "lr": 0.01},
            "engine": {"kind": engine},
        }
    )
    experiment = build_experiment(config)
    state = experiment.initial_state()
    state.task = 1
    begin_task(experiment, state)
    protect_half(experiment, state)
    return experiment, state


def protect_half(experiment: Experiment, state: RunState) -> None:
    """Put random bases of half the dimensions where a method keeps its bases."""
    halves = {}
    for layer in layers_shared_by_tasks(experiment.network):
        columns = torch.randn(
            layer.inputs, layer.inputs // 2, generator=torch.Generator().manual_seed(0)
        )
        halves[layer.name] = torch.linalg.qr(columns)[0]
    kept = state.server.state
    if hasattr(kept, "spaces"):
        spaces = {name: Subspace.of(basis).tree() for name, basis in halves.items()}
        state.server = replace(state.server, state=replace(kept, spaces=spaces))
    if experiment.method.ClientState is LocalBases:
        for client in range(experiment.config.clients.count):
            experiment.store_client_state(client, LocalBases(halves), {})


def seconds(experiment: Experiment, state: RunState) -> float:
    """Return the processor time of one round."""
    start = time.process_time()
    train_round(experiment, state)
    return time.process_time() - start


def compare(model: str, engine: str, repeats: int) -> dict[str, float]:
    """Return the best round of each method, in units of FedAvg's best."""
    runs = {method: at_second_task(model, method, engine) for method in METHODS}
    for experiment, state in runs.values():  # tracing and warming up
        train_round(experiment, state)
        train_round(experiment, state)
    best = dict.fromkeys(METHODS, float("inf"))
    for _ in range(repeats):
        for method in METHODS:
            best[method] = min(best[method], seconds(*runs[method]))
    return {method: value / best["fedavg"] for method, value in best.items()}


def main(repeats: int = 15) -> dict[str, Any]:
    """Measure both models, clients stacked, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ratios = {model: compare(model, "vector", repeats) for model in MODELS}
    finally:
        torch.set_num_threads(threads)
    return {
        "benchmark": "projection_cost",
        "statistic": f"best processor time of {repeats} rounds, taken in turns, one thread",
        "ratio_to_fedavg": {m: {k: round(r, 3) for k, r in v.items()} for m, v in ratios.items()},
        "bounds": {"mlp": {"fot": 1.05, "fedprotip": 1.25}, "conv": {"fedprotip": 1.35}},
    }


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
