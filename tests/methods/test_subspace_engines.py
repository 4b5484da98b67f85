"""The subspace methods give the same model with clients one by one and stacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from subspace_runs import experiment_of

from perdure.federation.loop import run_stream

CONV = {"kind": "conv", "width": 4, "norm": "batch"}


def assert_engines_agree(method: dict[str, Any], atol: float, **sections: Any) -> None:
    found = []
    for engine in ("serial", "vector"):
        experiment = experiment_of(method, engine={"kind": engine}, **sections)
        found.append(run_stream(experiment, experiment.start(), lambda *_: None).server.params)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=atol, msg=name)


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "fot", "threshold": 0.8},
        {"kind": "fedprotip"},
        {"kind": "fedprotip", "threshold": 0.9, "rank_rule": "mass"},
        {"kind": "fedprotip", "transport": "sketch", "threshold": 0.8},
        {"kind": "gpm", "threshold": 0.8},
    ],
    ids=str,
)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_on_the_mlp(method: dict[str, Any], decay: float) -> None:
    train = {"momentum": 0.5, "weight_decay": decay}
    assert_engines_agree(method, 3e-4, stream={"tasks": 2}, train=train)


@pytest.mark.parametrize("kind", ["fot", "fedprotip", "gpm"])
def test_on_the_conv_net_with_heads_of_their_own(kind: str) -> None:
    stream = {"kind": "split", "tasks": 2, "classes_per_task": 2}
    assert_engines_agree({"kind": kind}, 3e-4, stream=stream, model=CONV, data={"limit": 60})


@pytest.mark.parametrize("kind", ["fedprotip", "gpm"])
def test_with_adam(kind: str) -> None:
    train = {"optimizer": "adam", "lr": 0.003}
    assert_engines_agree({"kind": kind}, 1e-3, stream={"tasks": 2}, train=train)
