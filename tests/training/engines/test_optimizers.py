"""Optimizers step by step against torch.optim, alone and stacked; learning rates by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from perdure.config import TrainConfig
from perdure.training.local_training import clip_gradients
from perdure.training.optimizers import learning_rate, make_optimizer

SHAPES = [(4, 3), (4,), ()]
WAYS: list[dict[str, Any]] = [
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "momentum": 0.9},
    {"optimizer": "sgd", "momentum": 0.5, "weight_decay": 0.1},
    {"optimizer": "sgd", "weight_decay": 0.1},
    {"optimizer": "adam"},
    {"optimizer": "adam", "weight_decay": 0.1},
    {"optimizer": "adamw"},
    {"optimizer": "adamw", "weight_decay": 0.1},
]


def theirs(config: TrainConfig, params: list[Tensor]) -> torch.optim.Optimizer:
    if config.optimizer.kind == "sgd":
        return torch.optim.SGD(
            params, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
        )
    kind = torch.optim.Adam if config.optimizer.kind == "adam" else torch.optim.AdamW
    return kind(params, lr=config.lr, weight_decay=config.weight_decay)


def their_step(optimizer: torch.optim.Optimizer, params: list[Tensor], grads: list[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


def our_grads(config: TrainConfig, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """What a job hands to the optimizer: coupled weight decay is part of the gradient."""
    decay = 0.0 if config.optimizer.decouples_decay else config.weight_decay
    return [g + decay * p for g, p in zip(grads, params, strict=True)]


def drawn(generator: torch.Generator, clients: int | None = None) -> list[Tensor]:
    lead = () if clients is None else (clients,)
    return [
        torch.randn((*lead, *shape), generator=generator, dtype=torch.float64) for shape in SHAPES
    ]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_step_is_that_of_torch(way: dict[str, Any]) -> None:
    config, generator = TrainConfig(lr=0.05, **way), torch.Generator().manual_seed(0)
    mine = drawn(generator)
    other = [p.clone().requires_grad_() for p in mine]
    ours, reference = make_optimizer(config), theirs(config, other)
    for _ in range(12):
        grads = drawn(generator)
        ours.step(mine, our_grads(config, mine, grads), config.lr)
        their_step(reference, other, grads)
        for a, b in zip(mine, other, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_stacked_clients_that_stop_one_after_another(way: dict[str, Any]) -> None:
    """Client k of the stack takes part in steps[k] steps; the rest of the stack does not change."""
    config, generator = TrainConfig(lr=0.05, **way), torch.Generator().manual_seed(1)
    steps = [7, 7, 4, 1]
    stack = drawn(generator, len(steps))
    others = [[p[k].clone().requires_grad_() for p in stack] for k in range(len(steps))]
    ours, references = make_optimizer(config), [theirs(config, other) for other in others]
    for number in range(max(steps)):
        active, grads = sum(n > number for n in steps), drawn(generator, len(steps))
        views, cut = [p[:active] for p in stack], [g[:active] for g in grads]
        ours.step(views, our_grads(config, views, cut), config.lr, active)
        for k in range(active):
            their_step(references[k], others[k], [g[k] for g in grads])
        for k, other in enumerate(others):
            for a, b in zip(stack, other, strict=True):
                torch.testing.assert_close(a[k], b.detach(), rtol=1e-12, atol=1e-12)


def test_the_learning_rate_may_change_between_steps() -> None:
    config, generator = TrainConfig(momentum=0.9), torch.Generator().manual_seed(2)
    mine = drawn(generator)
    other = [p.clone().requires_grad_() for p in mine]
    ours, reference = make_optimizer(config), theirs(config, other)
    for lr in (0.1, 0.01, 0.3):
        reference.param_groups[0]["lr"] = lr
        grads = drawn(generator)
        ours.step(mine, grads, lr)
        their_step(reference, other, grads)
    torch.testing.assert_close(mine[0], other[0].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("limit", [0.1, 3.0, 1e6])
def test_clipping_is_that_of_torch(limit: float) -> None:
    grads = {str(k): g for k, g in enumerate(drawn(torch.Generator().manual_seed(3)))}
    leaves = [torch.zeros_like(g).requires_grad_() for g in grads.values()]
    for leaf, grad in zip(leaves, grads.values(), strict=True):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(leaves, limit)
    for leaf, grad in zip(leaves, clip_gradients(grads, limit).values(), strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(grad, leaf.grad)


def rates(rounds: int, task: int = 0, **values: Any) -> list[float]:
    config = TrainConfig.model_validate(values)
    return [learning_rate(config, task, r, rounds) for r in range(rounds)]


def test_a_constant_rate() -> None:
    assert rates(3, lr=0.5) == [0.5, 0.5, 0.5]


def test_an_exponential_rate() -> None:
    schedule = {"kind": "exponential", "gamma": 0.5}
    assert rates(4, lr=0.8, schedule=schedule) == pytest.approx([0.8, 0.4, 0.2, 0.1])


def test_a_rate_in_steps() -> None:
    schedule = {"kind": "step", "gamma": 0.1, "every": 2}
    assert rates(5, lr=1.0, schedule=schedule) == pytest.approx([1, 1, 0.1, 0.1, 0.01])


def test_a_cosine_rate() -> None:
    found = rates(4, lr=1.0, schedule={"kind": "cosine"})
    half = math.sqrt(0.5)
    assert found == pytest.approx([1, (1 + half) / 2, 0.5, (1 - half) / 2])
    floored = rates(4, lr=1.0, schedule={"kind": "cosine", "floor": 0.2})
    assert floored == pytest.approx([0.2 + 0.8 * rate for rate in found])


def test_a_cosine_rate_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.03)
    for rate in rates(10, lr=0.3, schedule={"kind": "cosine", "floor": 0.1}):
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        reference.step()


def test_the_rate_decays_from_task_to_task() -> None:
    schedule = {"kind": "exponential", "gamma": 0.5}
    for task in range(3):
        found = rates(2, task, lr=1.0, task_decay=0.1, schedule=schedule)
        assert found == pytest.approx([0.1**task, 0.5 * 0.1**task])
