"""A user's module with the architecture of a built-in network trains like it."""

from __future__ import annotations

from typing import Any

import pytest
import reference_nets
import user_modules
from torch import nn

from perdure.config import parse
from perdure.core.rng import Rng
from perdure.core.trees import Tensors
from perdure.engines.serial import SerialEngine
from perdure.engines.vector import VectorEngine
from perdure.training.experiment import build_experiment
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
BATCH_NORM = ("conv with batch norm and dropout", "resnet20")


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


@pytest.mark.parametrize("name", NETS)
def test_both_engines_give_the_same_weights(name: str) -> None:
    few = {"max_steps": 2} if name in BATCH_NORM else {}
    model, vector = {"kind": module_like(name)}, VectorEngine()
    serial = trained(model, SerialEngine(), **few)
    stacked = trained(model, vector, **few)
    assert not vector.choice()["serial"]
    bound = 1e-5 if name in BATCH_NORM else 1e-4
    assert difference(serial.server.params, stacked.server.params) < bound
