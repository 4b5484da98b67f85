"""A user's module with the architecture of a built-in network trains like it, and as in torch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import reference_nets
import torch
import user_modules
from torch import nn
from torch.nn import functional as F

from perdure.config import parse
from perdure.core.rng import Rng
from perdure.core.trees import Tensors
from perdure.training.engines.serial import SerialEngine
from perdure.training.engines.vector import VectorEngine
from perdure.training.experiment import build_experiment
from perdure.training.local_training import batch_schedule
from perdure.training.loop import run_stream
from perdure.training.state import RunState

BASE: dict[str, Any] = {
    "data": {"limit": 200, "normalize": False},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 2.0}},
    "train": {"rounds": 1, "local_epochs": 1, "batch_size": 16, "lr": 0.05},
}
NETS: dict[str, tuple[dict[str, Any], Any, int]] = {
    "mlp": ({"kind": "mlp", "hidden": [20, 12]}, lambda: reference_nets.Mlp([64, 20, 12]), 12),
    "conv": ({"kind": "conv", "width": 4}, lambda: reference_nets.Small(1, 8, 4), 128),
    "conv with batch norm and dropout": (
        {"kind": "conv", "width": 4, "norm": "batch", "dropout": 0.2},
        user_modules.ConvNorm,
        128,
    ),
    "conv with batch norm": (
        {"kind": "conv", "width": 4, "norm": "batch"},
        partial(user_modules.ConvNorm, dropout=0.0),
        128,
    ),
    "resnet20": (
        {"kind": "resnet20", "width": 4},
        lambda: reference_nets.Residual(4, [3, 3, 3], pad=True, channels=1),
        16,
    ),
    "vit": (
        {"kind": "vit", "init": "random", "width": 16, "heads": 2, "depth": 2, "patch": 4},
        user_modules.Vit,
        16,
    ),
}
DROPOUT = "conv with batch norm and dropout"
BATCH_NORM = (DROPOUT, "conv with batch norm", "resnet20")


def module_like(name: str) -> nn.Module:
    """Return the user's module with the values that the built-in network starts with."""
    values, make, size = NETS[name]
    experiment = build_experiment(parse({**BASE, "model": values}))
    initial, buffers = experiment.network.init(Rng(0).torch_generator("init"))
    module = user_modules.WithHead(make(), size)
    own = module.state_dict()
    for key, value in (initial | buffers).items():
        path = key.replace("head.", "out.") if key.startswith("head.") else f"body.{key}"
        own[path].copy_(value.reshape(own[path].shape))
    return module


class OneRound(Exception):
    """Ends a run after a round."""


def trained(model: dict[str, Any], engine: Any, **changes: Any) -> RunState:
    """Return the state after the first round."""
    values = {**BASE, "model": model}
    values["train"] = {**values["train"], **changes}
    experiment = build_experiment(parse(values), engine=engine)
    state = experiment.initial_state()

    def stop(state: RunState, event: Any) -> None:
        raise OneRound

    with pytest.raises(OneRound):
        run_stream(experiment, state, stop)
    return state


def difference(a: Tensors, b: Tensors, prefix: str = "") -> float:
    assert len(a) == len(b)
    return max(
        float((value - b[key if key.startswith("head.") else prefix + key].reshape(value.shape))
              .abs().max())
        for key, value in a.items()
    )  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_a_round_gives_the_weights_of_the_built_in_network(name: str) -> None:
    builtin = trained(NETS[name][0], SerialEngine())
    custom = trained({"kind": module_like(name)}, SerialEngine())
    before = dict(module_like(name).named_parameters())
    moved = max(
        float((value - before[key]).abs().max())
        for key, value in custom.server.params.items()
        if key in before
    )
    assert moved > 1e-3
    assert difference(builtin.server.params, custom.server.params, "body.") < 1e-5
    if name in BATCH_NORM:
        assert difference(builtin.server.buffers, custom.server.buffers, "body.") < 1e-5


def few_steps(name: str) -> dict[str, int]:
    """Return the steps after which rounding has not grown in batch norm."""
    return {"max_steps": 2} if name in BATCH_NORM else {}


def plain_round(name: str) -> Tensors:
    """Return the weights and statistics after a round of FedAvg in plain torch.

    The split into clients and the batches are those of the experiment.
    """
    module, train = module_like(name), {**BASE["train"], **few_steps(name)}
    experiment = build_experiment(parse({**BASE, "model": NETS[name][0], "train": train}))
    state, task = experiment.initial_state(), experiment.task(0)
    models, counts = [], []
    for number in range(3):
        net = copy.deepcopy(module).train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        client = experiment.client(number, experiment.context(state), state.server, {})
        for rows in batch_schedule(client, experiment.config.train):
            optimizer.zero_grad()
            x = task.train.rows[rows].reshape(-1, 1, 8, 8) / 255
            F.cross_entropy(net(x), task.train.y[rows]).backward()
            optimizer.step()
        models.append(net.state_dict())
        counts.append(len(task.partition.index(number)))
    shares = torch.tensor(counts) / sum(counts)
    return {
        key: sum(w * m[key] for w, m in zip(shares, models, strict=True))  # type: ignore[misc]
        for key in models[0]
        if not key.endswith("tracked")
    }


@pytest.mark.parametrize("name", [name for name in NETS if name != DROPOUT])
def test_a_round_of_a_built_in_network_gives_the_weights_of_plain_torch(name: str) -> None:
    server = trained(NETS[name][0], SerialEngine(), **few_steps(name)).server
    theirs = {key.replace("out.", "head.", 1) if key.startswith("out.") else key: value
              for key, value in plain_round(name).items()}  # fmt: skip
    assert difference(server.params | server.buffers, theirs, "body.") < 1e-5


@pytest.mark.parametrize("name", NETS)
def test_both_engines_give_the_same_weights(name: str) -> None:
    model, vector = {"kind": module_like(name)}, VectorEngine()
    serial = trained(model, SerialEngine(), **few_steps(name))
    stacked = trained(model, vector, **few_steps(name))
    assert not vector.choice()["serial"]
    bound = 1e-5 if name in BATCH_NORM else 1e-4
    assert difference(serial.server.params, stacked.server.params) < bound
