"""The assignment of a network's outputs to classes and tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outputs:
    """The outputs of a network, as tasks arrive.

    A shared head has one output per class that is known; where a task brings classes that nobody
    knew, they follow the others. A growing head gets one block of outputs per task: one output for
    each of the task's classes, after those of earlier tasks.

    Example:
        >>> outputs = Outputs("growing", 4, ((0, 1), (2, 3)))
        >>> outputs.task_mask(1, newest=1)
        tensor([False, False,  True,  True])
    """

    kind: Literal["shared", "growing"]
    """Kind of the head."""
    classes: int
    """Number of classes in total."""
    task_classes: Sequence[tuple[int, ...]]
    """Labels of each task."""
    known_classes: tuple[int, ...] | None = None
    """Number of classes that are known in each task. If None, all are known from the start."""
    is_number: bool = False
    """Whether the one output is a number to predict, not the score of a class."""

    def known(self, task: int) -> int:
        """Return the number of classes that are known while `task` is the newest."""
        return self.classes if self.known_classes is None else self.known_classes[task]

    def count(self, task: int) -> int:
        """Return the number of outputs while `task` is the newest."""
        return self.known(task) if self.kind == "shared" else self.first_output(task + 1)

    def added(self, task: int) -> int:
        """Return the number of outputs that a task adds to those before it."""
        return self.count(task) - (self.count(task - 1) if task else 0)

    def until(self, task: int) -> Outputs:
        """Return the outputs as they are while `task` is the newest."""
        known = None if self.known_classes is None else self.known_classes[: task + 1]
        classes = tuple(self.task_classes[: task + 1])
        return replace(self, classes=self.known(task), task_classes=classes, known_classes=known)

    @property
    def same_for_all_tasks(self) -> bool:
        """Whether every task has the same outputs, so that knowing the task restricts nothing.

        False if the classes of later tasks are not known yet. A single task has the same outputs as
        those that may follow if it has all classes.
        """
        if self.kind != "shared" or not isinstance(self.task_classes, tuple):
            return False
        groups = {frozenset(classes) for classes in self.task_classes}
        if len(self.task_classes) == 1:
            groups.add(frozenset(range(self.classes)))
        return len(groups) <= 1

    def first_output(self, task: int) -> int:
        """Return the index of the first output in a task's block of a growing head."""
        return sum(len(labels) for labels in self.task_classes[:task])

    def output_labels(self, task: int) -> Tensor:
        """Return the label of each output while `task` is the newest, int64 [outputs]."""
        if self.kind == "shared":
            return torch.arange(self.known(task))
        labels = chain.from_iterable(self.task_classes[: task + 1])
        return torch.tensor(list(labels), dtype=torch.int64)

    def targets(self, task: int) -> Tensor:
        """Return the output of each label, int64 [classes]; -1 for labels of other tasks."""
        labels = torch.tensor(self.task_classes[task], dtype=torch.int64)
        result = torch.full((self.classes,), -1, dtype=torch.int64)
        first = self.first_output(task)
        growing = torch.arange(first, first + len(labels))
        result[labels] = labels if self.kind == "shared" else growing
        return result

    def task_mask(self, task: int, newest: int, classes: Sequence[int] | None = None) -> Tensor:
        """Return the mask of a task's outputs, bool [outputs].

        Args:
            task: The task.
            newest: Newest task so far, which determines the number of outputs.
            classes: Include only the outputs of these classes. If None, all of the task's.
        """
        indices = self.targets(task)
        if classes is not None:
            indices = indices[torch.tensor(list(classes), dtype=torch.int64)]
        mask = torch.zeros(self.count(newest), dtype=torch.bool)
        mask[indices[indices >= 0]] = True
        return mask

    def seen_mask(self, newest: int) -> Tensor:
        """Return the mask of the outputs of all tasks so far, bool [outputs]."""
        mask = torch.zeros(self.count(newest), dtype=torch.bool)
        for task in range(newest + 1):
            mask |= self.task_mask(task, newest)
        return mask
