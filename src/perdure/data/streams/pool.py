"""Pool streams: each client goes through class groups of its own, in an order of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.data.load import model_source
from perdure.data.partition import Partition, present_only
from perdure.data.partition_kinds import make_partition
from perdure.data.source import Array
from perdure.data.streams.split import group_size
from perdure.data.streams.stream import (
    EvalGroup,
    NormalizedSource,
    Stream,
    Task,
    normalize_source,
    presence,
    unique_labels,
)


def pool_stream(config: Config, rng: Rng) -> Stream:
    """Client c's task t is the t-th group of the class order drawn for c.

    The training rows are divided over the clients once; in a task a client has those of its rows
    that belong to the task's classes.
    """
    if config.stream.overlap:
        raise bad_value("stream.overlap", config.stream.overlap, "0 for a pool stream")
    source = model_source(config, rng)
    material = normalize_source(source, config.data)
    labels = material.labels()
    shares = make_partition(
        labels,
        np.arange(len(labels)),
        config.clients.count,
        config.clients.partition,
        rng.numpy_generator("partition", 0),
    )
    chosen = class_choices(config, unique_labels(labels), rng)
    counts = shares.counts(labels, len(source.classes))
    tasks = [
        _task(material, t, mine, present_only(shares, presence(config, t, rng)), counts)
        for t, mine in enumerate(chosen)
    ]
    return Stream("pool", tasks, source.classes, source.shape)


def class_choices(config: Config, labels: tuple[int, ...], rng: Rng) -> list[Array]:
    """For every task, the classes of every client, int [clients, classes_per_task], sorted."""
    size, tasks = group_size(len(labels), config.stream), config.stream.tasks
    orders = np.empty((config.clients.count, size * tasks), np.int32)
    for client in range(config.clients.count):
        orders[client] = rng.numpy_generator("pool", client).permutation(labels)[: size * tasks]
    return [np.sort(part, axis=1) for part in np.split(orders, tasks, axis=1)]


def _task(
    material: NormalizedSource, number: int, chosen: Array, shares: Partition, counts: Array
) -> Task:
    sizes = np.take_along_axis(counts, chosen.astype(np.int64), axis=1).sum(1)
    mine = PoolPartition(shares, material.train_labels, chosen, np.where(shares.sizes, sizes, 0))
    groups = PoolGroups.of(chosen[mine.sizes > 0], material.test_labels)
    return Task(
        number,
        f"group {number} of every client",
        unique_labels(groups.chosen),
        material.train,
        material.train_labels,
        material.test,
        material.test_labels,
        mine,
        groups,
        mine.classes_of,
    )


@dataclass(frozen=True)
class PoolPartition:
    """A client's share of the whole training set, as far as it is of the client's classes."""

    partition: Partition
    labels: Tensor
    chosen: Array
    sizes: Array

    def index(self, client: int) -> Tensor:
        """Row numbers of a client."""
        held = self.partition.index(client)
        wanted = torch.from_numpy(self.chosen[client])
        return held[torch.isin(self.labels[held], wanted)]

    def classes_of(self, client: int) -> tuple[int, ...]:
        """The classes that a client chose."""
        return tuple(int(label) for label in self.chosen[client])

    def counts(self, labels: Array, classes: int) -> Array:
        """Rows of each class at each client."""
        table = self.partition.counts(labels, classes)
        other = np.ones(table.shape, bool)
        np.put_along_axis(other, self.chosen.astype(np.int64), False, axis=1)
        table[other] = 0
        return table


@dataclass(frozen=True)
class PoolGroups(Sequence[EvalGroup]):
    """One group of test rows for each set of classes that some client has, made on demand."""

    chosen: Array
    """int [groups, classes in a group]"""
    weights: Array
    """How many clients have the group."""
    rows: tuple[Tensor, ...]
    """Test rows of each label."""

    @classmethod
    def of(cls, chosen: Array, test_labels: Tensor) -> PoolGroups:
        """The distinct groups among the rows of `chosen`."""
        distinct, weights = np.unique(chosen, axis=0, return_counts=True)
        top = int(max(test_labels.max(), chosen.max(initial=0)))
        rows = tuple((test_labels == k).nonzero().flatten() for k in range(top + 1))
        return cls(distinct, weights, rows)

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, place: int) -> EvalGroup: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[EvalGroup]: ...
    def __getitem__(self, place: int | slice) -> EvalGroup | Sequence[EvalGroup]:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        classes = tuple(int(label) for label in self.chosen[place])
        index = torch.cat([self.rows[label] for label in classes])
        return EvalGroup(index, classes, float(self.weights[place]))

    def __iter__(self) -> Iterator[EvalGroup]:
        return (self[place] for place in range(len(self)))
