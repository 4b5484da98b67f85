"""Optimizers as arithmetic on lists of tensors, in place, and the learning rate of a round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perdure.config import CosineSchedule, ExponentialSchedule, StepSchedule, TrainConfig

# ------------------------------------------------------------------------------------------------
# The learning rate of a round.
# ------------------------------------------------------------------------------------------------


def learning_rate(config: TrainConfig, task: int, round_: int, rounds: int) -> float:
    """Return the local learning rate of a round, which is one of `rounds` of its task."""
    base = config.lr * config.task_decay**task
    match config.schedule:
        case ExponentialSchedule(gamma=gamma):
            return base * gamma**round_
        case StepSchedule(gamma=gamma, every=every):
            return base * gamma ** (round_ // every)
        case CosineSchedule(floor=floor):
            shape = (1 + math.cos(math.pi * round_ / rounds)) / 2
            return base * (floor + (1 - floor) * shape)
    return base


# ------------------------------------------------------------------------------------------------
# Optimizers as arithmetic on lists of tensors, in place, so that stacked clients cost one call.
#
# They follow torch.optim's formulas; the tests compare step by step.
# ------------------------------------------------------------------------------------------------

Values = list[Tensor]


@dataclass
class Optimizer:
    """State of one optimizer over a list of tensors (with or without a client axis)."""

    kind: str
    momentum: float
    decay: float
    """Decoupled weight decay (adamw only; coupled decay is part of the gradient)."""
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)
    steps: int = 0

    def step(
        self, params: Values, grads: Values, lr: float, active_clients: int | None = None
    ) -> None:
        """Change `params` in place."""
        active = active_clients
        self.steps += 1
        if self.kind == "sgd":
            self._sgd(params, grads, lr, active)
        else:
            self._adam(params, grads, lr, active)

    def _sgd(self, params: Values, grads: Values, lr: float, active: int | None) -> None:
        if self.momentum:
            if not self.first:
                self.first = [torch.zeros_like(p) for p in params]
            grads = self._state(self.first, active, grads)
        torch._foreach_add_(params, grads, alpha=-lr)

    def _state(self, state: Values, active: int | None, grads: Values) -> Values:
        buffers = [s if active is None else s[:active] for s in state]
        torch._foreach_mul_(buffers, self.momentum)
        torch._foreach_add_(buffers, grads)
        return buffers

    def _adam(self, params: Values, grads: Values, lr: float, active: int | None) -> None:
        beta1, beta2, eps = 0.9, 0.999, 1e-8
        if not self.first:
            self.first = [torch.zeros_like(p) for p in params]
            self.second = [torch.zeros_like(p) for p in params]
        first = [s if active is None else s[:active] for s in self.first]
        second = [s if active is None else s[:active] for s in self.second]
        if self.decay:
            torch._foreach_mul_(params, 1 - lr * self.decay)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, math.sqrt(1 - beta2**self.steps))
        torch._foreach_add_(root, eps)
        torch._foreach_addcdiv_(params, first, root, -lr / (1 - beta1**self.steps))


def make_optimizer(config: TrainConfig) -> Optimizer:
    """Return a new optimizer: clients start every round without a state."""
    return Optimizer(config.optimizer.kind, config.momentum, config.decoupled_decay)
