"""Cumulative streams: every task is trained on the examples of all tasks so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config, DomainConfig
from perdure.core.rng import Rng
from perdure.data.clients import check_clients, unify_clients
from perdure.data.images import unify_shapes
from perdure.data.inputs import Inputs, JoinedInputs
from perdure.data.labels import unify_classes
from perdure.data.partition import Partition
from perdure.data.source import Array, Examples, Source
from perdure.data.streams.domains import label_space, listed
from perdure.data.streams.stream import EvalGroup, Stream, Task, map_tasks
from perdure.data.text import tokenize_if_text

# ------------------------------------------------------------------------------------------------
# Join several sources into one, over one label space.
# ------------------------------------------------------------------------------------------------


def joined_source(domains: list[DomainConfig], labels: str, config: Config, rng: Rng) -> Source:
    """Return the sources of `stream.domains` as one, brought to one shape."""
    sources = unify_shapes(tokenize_if_text(listed(domains, config, rng), config))
    sources = unify_clients(sources)
    check_clients(config, sources[0])
    sources = unify_classes(sources) if labels == "shared" else sources
    offsets, names = label_space(sources, labels)
    name = " and ".join(source.name for source in sources)
    train = _together([source.train for source in sources], offsets)
    test = _together([source.test for source in sources], offsets)
    return replace(sources[0], name=name, train=train, test=test, class_names=names, texts=None)


def _together(parts: list[Examples], offsets: list[int]) -> Examples:
    labels = [part.y + offset for part, offset in zip(parts, offsets, strict=True)]
    clients = [part.clients for part in parts if part.clients is not None]
    named = torch.cat(clients) if len(clients) == len(parts) else None
    return Examples(torch.cat([part.x for part in parts]), torch.cat(labels), named)


# ------------------------------------------------------------------------------------------------
# Cumulative streams: every task is trained on the examples of all tasks so far.
# ------------------------------------------------------------------------------------------------


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
