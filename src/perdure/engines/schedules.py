"""The learning rate of a round."""

from __future__ import annotations

import math

from perdure.config import CosineSchedule, ExponentialSchedule, StepSchedule, TrainConfig


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
