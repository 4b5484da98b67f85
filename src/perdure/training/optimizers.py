"""Learning rates over rounds, and the clients' optimizers on lists of tensors."""

from __future__ import annotations

import math
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from perdure.config.section import NonNegativeFloat, PositiveFloat, PositiveInt, Probability
from perdure.config.train import OptimizerConfig, Schedule, TrainConfig
from perdure.core.registry import Registry

# ---- Schedules of the learning rate: `train.schedule`

SCHEDULES: Registry[Schedule] = Registry(
    key="train.schedule.kind", base=Schedule, base_name="perdure.config.train.Schedule",
    group="perdure.schedules",
    builtin={
        "constant": "perdure.training.optimizers.ConstantSchedule",
        "cosine": "perdure.training.optimizers.CosineSchedule",
        "exponential": "perdure.training.optimizers.ExponentialSchedule",
        "step": "perdure.training.optimizers.StepSchedule",
    },
)  # fmt: skip


class ConstantSchedule(Schedule):
    """The learning rate does not change.

    Example: `schedule: {kind: constant}`
    """

    def factor(self, round_: int, rounds: int) -> float:
        """Return 1."""
        return 1.0


class CosineSchedule(Schedule):
    """Half a period of a cosine, from the learning rate to `floor` times it.

    Example: `schedule: {kind: cosine, floor: 0.01}`
    """

    floor: NonNegativeFloat = 0.0
    """Fraction of the learning rate that is left at the end of a task."""

    def factor(self, round_: int, rounds: int) -> float:
        """Return the height of the cosine at the start of the round."""
        shape = (1 + math.cos(math.pi * round_ / rounds)) / 2
        return self.floor + (1 - self.floor) * shape


class ExponentialSchedule(Schedule):
    """The learning rate is multiplied by `gamma` after every round.

    Example: `schedule: {kind: exponential, gamma: 0.95}`
    """

    gamma: PositiveFloat = 0.99
    """Factor per round (exponential) or per step (step)."""

    def factor(self, round_: int, rounds: int) -> float:
        """Return gamma to the power of the rounds before."""
        return self.gamma**round_


class StepSchedule(Schedule):
    """The learning rate is multiplied by `gamma` after every `every` rounds.

    Example: `schedule: {kind: step, gamma: 0.1, every: 10}`
    """

    gamma: PositiveFloat = 0.99
    """Factor per round (exponential) or per step (step)."""
    every: PositiveInt = 10
    """Rounds between two steps."""

    def factor(self, round_: int, rounds: int) -> float:
        """Return gamma to the power of the steps before."""
        return self.gamma ** (round_ // self.every)


def learning_rate(config: TrainConfig, task: int, round_: int, rounds: int) -> float:
    """Return the local learning rate of a round, which is one of `rounds` of its task."""
    return config.lr * config.task_decay**task * config.schedule.factor(round_, rounds)


# ---- Optimizers: `train.optimizer`
#
# They are arithmetic on lists of tensors, in place, so that stacked clients cost one call, and
# follow torch.optim's formulas; the tests compare step by step.

OPTIMIZERS: Registry[OptimizerConfig] = Registry(
    key="train.optimizer.kind", base=OptimizerConfig,
    base_name="perdure.config.train.OptimizerConfig", group="perdure.optimizers",
    builtin={
        "sgd": "perdure.training.optimizers.SgdOptimizer",
        "adam": "perdure.training.optimizers.AdamOptimizer",
        "adamw": "perdure.training.optimizers.AdamwOptimizer",
    },
)  # fmt: skip
Values = list[Tensor]


class Optimizer(Protocol):
    """The state of an optimizer over a list of tensors (with or without a client axis)."""

    def step(
        self, params: Values, grads: Values, lr: float, active_clients: int | None = None
    ) -> None:
        """Change `params` in place; with a client axis only its first `active_clients` rows."""
        ...


def make_optimizer(config: TrainConfig) -> Optimizer:
    """Return a new optimizer: clients start every round without a state."""
    kind = config.optimizer
    made: Optimizer = kind.make(config.weight_decay if kind.decouples_decay else 0.0)
    return made


def _active(values: Values, clients: int | None) -> Values:
    """Return the rows of the clients that take a step."""
    return values if clients is None else [value[:clients] for value in values]


class SgdOptimizer(OptimizerConfig):
    """Stochastic gradient descent.

    Example: `optimizer: {kind: sgd, momentum: 0.9}`
    """

    momentum: Probability = 0.0
    """Momentum in [0, 1). It may also be written as `train.momentum`."""

    sums_gradients: ClassVar[bool] = True

    def make(self, decay: float) -> Optimizer:
        """Return a new optimizer."""
        return Sgd(self.momentum)


class Sgd:
    """The state of SGD: the running sums of gradients, if it has momentum."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.sums: Values = []

    def step(
        self, params: Values, grads: Values, lr: float, active_clients: int | None = None
    ) -> None:
        """Change `params` in place."""
        if self.momentum:
            self.sums = self.sums or [torch.zeros_like(p) for p in params]
            sums = _active(self.sums, active_clients)
            torch._foreach_mul_(sums, self.momentum)
            torch._foreach_add_(sums, grads)
            grads = sums
        torch._foreach_add_(params, grads, alpha=-lr)


class AdamOptimizer(OptimizerConfig):
    """Adam with PyTorch's defaults; weight decay is added to the gradient.

    Example: `optimizer: adam`
    """

    def make(self, decay: float) -> Optimizer:
        """Return a new optimizer."""
        return Adam(decay)


class AdamwOptimizer(AdamOptimizer):
    """Adam with PyTorch's defaults and decoupled weight decay.

    Example: `optimizer: adamw`
    """

    decouples_decay: ClassVar[bool] = True


class Adam:
    """The state of Adam: running means of gradients and of their squares.

    Args:
        decay: Decoupled weight decay.

    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.first: Values = []
        self.second: Values = []
        self.steps = 0

    def step(
        self, params: Values, grads: Values, lr: float, active_clients: int | None = None
    ) -> None:
        """Change `params` in place."""
        self.steps += 1
        beta1, beta2, eps = 0.9, 0.999, 1e-8
        if not self.first:
            self.first = [torch.zeros_like(p) for p in params]
            self.second = [torch.zeros_like(p) for p in params]
        first, second = _active(self.first, active_clients), _active(self.second, active_clients)
        if self.decay:
            torch._foreach_mul_(params, 1 - lr * self.decay)
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, math.sqrt(1 - beta2**self.steps))
        torch._foreach_add_(root, eps)
        torch._foreach_addcdiv_(params, first, root, -lr / (1 - beta1**self.steps))
