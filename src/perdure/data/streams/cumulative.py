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
from perdure.data.examples import Array, Examples, JoinedExamples, Source
from perdure.data.images import unify_shapes
from perdure.data.labels import unify_classes
from perdure.data.partition import Partition
from perdure.data.streams.domains import label_space, listed
from perdure.data.streams.stream import Stream, Task, map_tasks
from perdure.data.text import tokenize_if_text

# ---- Join several sources into one, over one label space


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
    return replace(sources[0], name=name, train=train, test=test, class_names=names)


def _together(parts: list[Examples], offsets: list[int]) -> Examples:
    labels = [part.y + offset for part, offset in zip(parts, offsets, strict=True)]
    clients = [part.clients for part in parts if part.clients is not None]
    named = torch.cat(clients) if len(clients) == len(parts) else None
    return Examples(torch.cat([part.x for part in parts]), torch.cat(labels), named)


# ---- Cumulative streams: every task is trained on the examples of all tasks so far


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
    parts = tuple(task.train for task in tasks if isinstance(task.train, Examples))
    sizes, groups = tuple(len(part) for part in parts), tasks[-1].validation
    return replace(
        tasks[-1],
        train=JoinedExamples(parts),
        partition=JoinedPartition(tuple(task.partition for task in tasks), sizes),
        validation=[replace(group, index=group.index + sum(sizes[:-1])) for group in groups],
    )


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
