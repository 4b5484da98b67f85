"""All three methods on every kind of model: what is protected does not move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from subspace_runs import clients_of, experiment_of, next_task, train_task

from perdure.training.experiment import Experiment
from perdure.training.state import RunState

MODELS = [
    {"kind": "mlp", "hidden": [80, 60]},
    {"kind": "mlp", "hidden": [40], "norm": "batch"},
    {"kind": "conv", "width": 6},
    {"kind": "conv", "width": 6, "norm": "batch"},
    {"kind": "resnet20", "width": 4},
    {"kind": "resnet18-reduced", "width": 4},
]
METHODS = [
    {"kind": "fot", "threshold": 1.0},
    {"kind": "fedprotip", "threshold": 1.0, "max_columns": 100_000},
    {"kind": "gpm", "threshold": 1.0, "max_columns": 100_000},
]


def logits(experiment: Experiment, state: RunState, images: torch.Tensor) -> torch.Tensor:
    out = experiment.method.predict(state.server, images, experiment.network)
    return out[:, : experiment.network.outputs.count(0)]


@pytest.mark.parametrize("stream", ["permuted", "split"])
@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: str(m["kind"]))
def test_old_outputs_do_not_change_at_threshold_one(
    method: dict[str, Any], model: dict[str, Any], stream: str
) -> None:
    """With all inputs of the first task protected, a whole new task leaves its logits alone.

    Few examples, so that there is free space left in which the new task is learned.
    """
    clients = {"count": 1 if method["kind"] == "gpm" else 2, "partition": {"kind": "iid"}}
    experiment = experiment_of(
        method,
        data={"limit": 8 if stream == "permuted" else 40},
        stream={
            "kind": stream,
            "tasks": 2,
            **({"classes_per_task": 2} if stream == "split" else {}),
        },
        clients=clients,
        model=model,
        train={"lr": 0.01, "rounds": [15, 3], "batch_size": 8},
    )
    state = experiment.initial_state()
    train_task(experiment, state)
    old = torch.cat([c.data.batch(c.data.index).x for c in clients_of(experiment, state, {})])
    before, params = logits(experiment, state, old), state.server.params
    next_task(state)
    train_task(experiment, state, ended=False)
    assert float((logits(experiment, state, old) - before).abs().max()) < 1e-4
    moved = max(float((state.server.params[n] - p).abs().max()) for n, p in params.items())
    assert moved > 1e-4 or stream == "split"


def test_without_protection_they_do_move() -> None:
    """The test above can fail: FedAvg's logits move by far more."""
    experiment = experiment_of({"kind": "fedavg"}, data={"limit": 8}, clients={"count": 2})
    state = experiment.initial_state()
    train_task(experiment, state)
    old = clients_of(experiment, state, {})[0].data
    x = old.batch(old.index).x
    before = logits(experiment, state, x)
    next_task(state)
    train_task(experiment, state)
    assert float((logits(experiment, state, x) - before).abs().max()) > 1e-2
