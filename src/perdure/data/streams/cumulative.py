"""Cumulative streams: every task is trained on the examples of all tasks so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from perdure.data.inputs import Inputs
from perdure.data.joined_inputs import JoinedInputs
from perdure.data.partition import Partition
from perdure.data.source import Array
from perdure.data.streams.stream import EvalGroup, Stream, Task, map_tasks


def make_cumulative(stream: Stream) -> Stream:
    """Return the stream with the training data of tasks 1 to t in task t.

    Each client holds in task t what it held in the tasks so far. What tasks are tested on, and the
    classes that are new in them, do not change.
    """
    tasks = stream.tasks
    joined = map_tasks(tasks, lambda task: _joined(tasks[: task.index + 1]))
    return replace(stream, tasks=joined)


def _joined(tasks: Sequence[Task]) -> Task:
    """Return the last of some tasks with the training data of all of them."""
    sizes = torch.tensor([len(task.train_labels) for task in tasks])
    return replace(
        tasks[-1],
        train=JoinedInputs(tuple(_inputs(task) for task in tasks)),
        train_labels=torch.cat([task.train_labels for task in tasks]),
        partition=JoinedPartition(tuple(task.partition for task in tasks), tuple(sizes.tolist())),
        origins=torch.arange(len(tasks)).repeat_interleave(sizes),
        validation=_shifted(tasks[-1].validation, int(sizes[:-1].sum())),
    )


def _shifted(groups: Sequence[EvalGroup], start: int) -> list[EvalGroup]:
    """Return groups of a training set's rows, which begin at `start` in the joined one."""
    return [replace(group, index=group.index + start) for group in groups]


def _inputs(task: Task) -> Inputs:
    assert isinstance(task.train, Inputs)
    return task.train


@dataclass(frozen=True)
class JoinedPartition:
    """The partitions of several training sets, whose rows follow each other."""

    parts: tuple[Partition, ...]
    """One partition per training set, over the same clients."""
    lengths: tuple[int, ...]
    """Number of rows of each training set."""

    @property
    def sizes(self) -> Array:
        """Number of rows per client."""
        total: Array = np.sum([part.sizes for part in self.parts], axis=0)
        return total

    def index(self, client: int) -> Tensor:
        """Return the rows of a client, those of the first training set first."""
        shifted = zip(self.parts, self._starts(), strict=True)
        return torch.cat([part.index(client) + start for part, start in shifted])

    def counts(self, labels: Array, classes: int) -> Array:
        """Return the number of rows per client and class."""
        each = np.split(labels, self._starts()[1:])
        tables = [part.counts(y, classes) for part, y in zip(self.parts, each, strict=True)]
        total: Array = np.sum(tables, axis=0)
        return total

    def _starts(self) -> list[int]:
        """Return the first row of each training set."""
        return [0, *np.cumsum(self.lengths)[:-1].tolist()]
