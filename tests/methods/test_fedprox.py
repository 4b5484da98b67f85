"""FedProx: the proximal term against autograd, and what it does to a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import perdure
from perdure.config import parse
from perdure.contract import Client
from perdure.methods.fedprox import FedProx
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream

VALUES: dict[str, Any] = {
    "data": {"limit": 120},
    "stream": {"tasks": 1},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.2}},
    "model": {"hidden": [8]},
    "train": {"rounds": 2, "local_epochs": 3, "batch_size": 8},
    "engine": {"kind": "serial"},
}


def client_that_received(params: dict[str, torch.Tensor]) -> Client:
    experiment = build_experiment(parse(VALUES))
    state = experiment.initial_state()
    client = experiment.client(0, experiment.context(state), state.server, {"params": params})
    return replace(client, params=params)


@pytest.mark.parametrize("mu", [0.0, 0.01, 2.0])
def test_the_gradient_is_that_of_the_penalized_loss(mu: float) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, torch.Tensor]:
        return {n: torch.randn(s, generator=generator) for n, s in (("w", (3, 2)), ("b", (3,)))}

    params, start, factor = draw(), draw(), draw()
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss = sum((factor[n] * leaves[n].square()).sum() for n in leaves)
    squares = sum((leaves[n] - start[n]).square().sum() for n in leaves)
    wanted = torch.autograd.grad(loss + mu / 2 * squares, list(leaves.values()))
    plain = {n: 2 * factor[n] * params[n] for n in params}
    client = client_that_received(start)
    (train,) = FedProx(mu=mu).exchanges(client.context)
    (transform,) = train.prepare(client).transforms
    found = transform.on_gradient(plain, params)
    for value, other in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(value, other)


def model_after(method: dict[str, Any]) -> dict[str, torch.Tensor]:
    experiment = build_experiment(parse({**VALUES, "method": method}))
    return run_stream(experiment, experiment.initial_state(), lambda *_: None).server.params


def test_without_a_weight_it_is_fedavg() -> None:
    hashes = {
        perdure.run({**VALUES, "method": method}).values["model_sha256"]
        for method in ({"kind": "fedavg"}, {"kind": "fedprox", "mu": 0.0})
    }
    assert len(hashes) == 1


def test_the_larger_the_weight_the_less_the_model_moves() -> None:
    start = build_experiment(parse(VALUES)).initial_state().server.params
    moved = []
    for mu in (0.0, 0.3, 3.0):
        params = model_after({"kind": "fedprox", "mu": mu})
        moved.append(sum((params[n] - start[n]).square().sum().item() for n in start))
    assert moved[0] > moved[1] > moved[2] > 0
