"""The learning rate of a round."""

from __future__ import annotations

import math

from perdure.config import TrainConfig


def learning_rate(config: TrainConfig, task: int, round_: int, rounds: int) -> float:
    """The local learning rate of a round."""
    base, schedule = config.lr * config.task_decay**task, config.schedule
    if schedule.kind == "exponential":
        return base * schedule.gamma**round_
    if schedule.kind == "step":
        return base * schedule.gamma ** (round_ // schedule.every)
    if schedule.kind == "cosine":
        shape = (1 + math.cos(math.pi * round_ / rounds)) / 2
        return base * (schedule.floor + (1 - schedule.floor) * shape)
    return base
