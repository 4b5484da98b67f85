"""How well rows fit the tasks so far: what a router decides by."""

from __future__ import annotations

import torch
from torch import Tensor

NO_TASK = -1
"""The predicted task of a row that fits no known task."""


def best_tasks(scores: Tensor) -> Tensor:
    """Return the task of the largest score of each row, int64 [rows].

    Args:
        scores: float [rows, tasks]; -inf for all tasks of a row of no known task, which gets
            NO_TASK.
    """
    best, tasks = scores.max(1)
    return tasks.masked_fill(best == -torch.inf, NO_TASK)


def task_margins(scores: Tensor) -> Tensor:
    """Return the largest score of each row minus the second largest, float [rows].

    NaN for a row that fits fewer than two tasks.

    Args:
        scores: float [rows, tasks]; -inf for tasks that the row does not fit.
    """
    if scores.shape[1] < 2:
        return scores.new_full((len(scores),), torch.nan)
    first, second = scores.topk(2, dim=1).values.unbind(1)
    return torch.where(second == -torch.inf, torch.nan, first - second)
