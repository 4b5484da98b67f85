"""Which output of a network answers for which class of which task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outputs:
    """The outputs of a network, as tasks arrive.

    A shared head has one output for each class. A growing head gets, with each task, a slice of
    its own: one output for each of the task's classes, after those of earlier tasks.
    """

    kind: Literal["shared", "growing"]
    classes: int
    """Size of the label space."""
    task_classes: tuple[tuple[int, ...], ...]
    """The labels of each task."""

    def count(self, task: int) -> int:
        """Outputs that exist while `task` is the newest."""
        return self.classes if self.kind == "shared" else self.first_output(task + 1)

    def first_output(self, task: int) -> int:
        """The first output of a task's slice (growing), which is where the ones before end."""
        return sum(len(labels) for labels in self.task_classes[:task])

    def output_labels(self, task: int) -> Tensor:
        """The label that each output stands for, while `task` is the newest."""
        if self.kind == "shared":
            return torch.arange(self.classes)
        labels = chain.from_iterable(self.task_classes[: task + 1])
        return torch.tensor(list(labels), dtype=torch.int64)

    def targets(self, task: int) -> Tensor:
        """The output for each label of a task; -1 for labels that are not the task's."""
        labels = torch.tensor(self.task_classes[task], dtype=torch.int64)
        result = torch.full((self.classes,), -1, dtype=torch.int64)
        first = self.first_output(task)
        growing = torch.arange(first, first + len(labels))
        result[labels] = labels if self.kind == "shared" else growing
        return result

    def task_mask(self, task: int, newest: int, classes: Sequence[int] | None = None) -> Tensor:
        """Mask of a task's outputs, or of those for some of its classes only."""
        places = self.targets(task)
        if classes is not None:
            places = places[torch.tensor(list(classes), dtype=torch.int64)]
        mask = torch.zeros(self.count(newest), dtype=torch.bool)
        mask[places[places >= 0]] = True
        return mask

    def seen_mask(self, newest: int) -> Tensor:
        """Mask of the outputs of all tasks so far."""
        mask = torch.zeros(self.count(newest), dtype=torch.bool)
        for task in range(newest + 1):
            mask |= self.task_mask(task, newest)
        return mask
