"""Every method trains alike on both engines: two tasks of one round of two steps."""

from __future__ import annotations

from typing import Any

import pytest

from perdure.config import parse
from perdure.methods.registry import KINDS
from perdure.runs.trial import dry_run

PROMPTS = ("fed-l2p", "fed-dualp", "pip")
VALUES: dict[str, Any] = {
    "data": {"limit": 160},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [12, 12]},
    "train": {"batch_size": 16, "lr": 0.05},
}
SPLIT = {
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 2.0}},
}
VIT = {
    **SPLIT,
    "model": {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4},
}


def check(values: dict[str, Any]) -> None:
    trial = dry_run(parse({**VALUES, **values}))
    assert trial.stacked
    assert trial.difference < 1e-5, trial.parameter


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_shared_head(kind: str) -> None:
    check({"method": {"kind": kind}, **(VIT if kind in PROMPTS else {})})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PROMPTS])
def test_with_a_growing_head(kind: str) -> None:
    check({"method": {"kind": kind}, **SPLIT, "model": {"hidden": [12], "head": "growing"}})


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in (*PROMPTS, "scaffold", "fednova")])
def test_with_adam_decay_and_clipping(kind: str) -> None:
    train = {"optimizer": "adam", "lr": 0.003, "weight_decay": 0.01, "clip": 0.5, "batch_size": 16}
    check({"method": {"kind": kind}, "train": train})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PROMPTS])
def test_on_a_conv_net_with_dropout(kind: str) -> None:
    check({"method": {"kind": kind}, "model": {"kind": "conv", "width": 4, "dropout": 0.2}})
