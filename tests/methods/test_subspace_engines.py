"""The subspace methods give the same model with clients one by one and stacked.

Engines are compared over one round from the same state, in the first task and in the second, whose
steps are projected: over more rounds rounding grows until the processor decides.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from subspace_runs import experiment_of, next_task

from perdure.core.trees import Tensors
from perdure.training.experiment import Experiment
from perdure.training.loop import begin_task, end_task
from perdure.training.round import train_round
from perdure.training.state import RunState

CONV = {"kind": "conv", "width": 4, "norm": "batch"}


def assert_engines_agree(method: dict[str, Any], **sections: Any) -> None:
    sections = {"train": {}, **sections}
    sections["train"] = {"rounds": 1, **sections["train"]}
    serial = experiment_of(method, **sections)
    vector = experiment_of(method, engine={"kind": "vector"}, **sections)
    vector = replace(vector, store=serial.store)  # the same client states
    state = serial.initial_state()
    for _ in range(2):
        begin_task(serial, state)
        stacked, before = trained(vector, state), state.server.params
        train_round(serial, state)
        moved = 0.0
        for name, value in state.server.params.items():
            torch.testing.assert_close(stacked[name], value, rtol=0, atol=1e-5, msg=name)
            moved = max(moved, float((value - before[name]).abs().max()))
        assert moved > 1e-3
        end_task(serial, state)
        next_task(state)
    assert not vector.engine.choice()["serial"]  # it did not fall back


def trained(experiment: Experiment, state: RunState) -> Tensors:
    """The model after one round, without touching the state."""
    own = deepcopy(state)
    train_round(experiment, own)
    return own.server.params


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "fot", "threshold": 0.8},
        {"kind": "fedprotip"},
        {"kind": "fedprotip", "bases": "union", "threshold": 0.9, "rank_rule": "mass"},
        {"kind": "fedprotip", "transport": "sketch", "threshold": 0.8},
        {"kind": "gpm", "threshold": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_on_the_mlp(method: dict[str, Any], decay: float) -> None:
    train = {"momentum": 0.5, "weight_decay": decay}
    assert_engines_agree(method, stream={"tasks": 2}, train=train)


@pytest.mark.parametrize("kind", ["fot", "fedprotip", "gpm"])
def test_engines_agree_on_a_conv_net_with_growing_heads(kind: str) -> None:
    """With even clients: batch norm over two rows divides by a variance of almost nothing."""
    stream = {"kind": "split", "tasks": 2, "classes_per_task": 2}
    clients = {"partition": {"kind": "iid"}}
    assert_engines_agree(
        {"kind": kind}, stream=stream, model=CONV, data={"limit": 60}, clients=clients
    )


@pytest.mark.parametrize("kind", ["fedprotip", "gpm"])
def test_with_adam(kind: str) -> None:
    train = {"optimizer": "adam", "lr": 0.003}
    assert_engines_agree({"kind": kind}, stream={"tasks": 2}, train=train)
