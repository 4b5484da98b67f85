"""Pool streams: each client has a separate order of classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, overload

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor

from perdure.config import Config, StreamConfig
from perdure.config.section import Item, PositiveInt
from perdure.core.rng import Rng
from perdure.data.examples import Array, Source
from perdure.data.load import load_model_source
from perdure.data.normalization import normalize_source
from perdure.data.partition import Partition, partition_once, present_in_task
from perdure.data.streams.split import group_size, with_group_size
from perdure.data.streams.stream import (
    EvalGroup,
    Stream,
    Task,
    label_array,
    unique_labels,
)


class PoolStream(StreamConfig):
    """Each client has a separate order of classes; its task t is the t-th group of them.

    The training examples are divided among the clients once; in a task a client has those of its
    examples that belong to its classes of the task.

    Example: `stream: {kind: pool, tasks: 50, classes_per_task: 2}`
    """

    classes_per_task: PositiveInt | None = None
    """Classes per task and client. Default: as many as go evenly into the tasks."""

    order: list[Item] | None = None
    """Always null: every client has its own order of classes, drawn from the seed."""

    resembles: ClassVar[str] = "pool"
    separates_classes: ClassVar[bool] = True
    mixes_tasks: ClassVar[bool] = True

    @property
    def is_open(self) -> bool:
        """Whether the number of classes per task is found from the number of tasks."""
        return self.classes_per_task is None

    def fixed(self, stream: Stream) -> StreamConfig:
        """Return the section with the number of classes per task of a stream."""
        return with_group_size(self, stream)

    @model_validator(mode="after")
    def _no_common_order(self) -> PoolStream:
        if self.order is not None:
            expected = "null on a pool stream, since every client has its own order of classes"
            raise ValueError(f"order: must be {expected}, got {self.order!r}")
        return self

    def build(self, config: Config, rng: Rng) -> Stream:
        """Return the stream of a config."""
        source = load_model_source(config, rng)
        normalized = normalize_source(source, config.data)
        labels = label_array(normalized.train)
        partition = partition_once(normalized.train, config.clients, rng)
        choices = class_choices(self, config.clients.count, unique_labels(labels), rng)
        counts = partition.counts(labels, len(source.class_names))
        tasks = [
            _task(normalized, t, chosen, present_in_task(partition, config, t, rng), counts)
            for t, chosen in enumerate(choices)
        ]
        return Stream.of("pool", tasks, source)


def class_choices(
    stream: PoolStream, clients: int, labels: tuple[int, ...], rng: Rng
) -> list[Array]:
    """Return per task the sorted classes of every client, int [clients, classes per task]."""
    tasks = stream.tasks
    size = group_size(len(labels), tasks, stream.classes_per_task)
    orders = np.empty((clients, size * tasks), np.int32)
    for client in range(clients):
        orders[client] = rng.numpy_generator("pool", client).permutation(labels)[: size * tasks]
    return [np.sort(part, axis=1) for part in np.split(orders, tasks, axis=1)]


def _task(
    source: Source, number: int, chosen: Array, all_clients: Partition, counts: Array
) -> Task:
    sizes = np.take_along_axis(counts, chosen.astype(np.int64), axis=1).sum(1)
    partition = PoolPartition(
        all_clients, source.train.y, chosen, np.where(all_clients.sizes, sizes, 0)
    )
    groups = PoolGroups.of(chosen[partition.sizes > 0], source.test.y)
    return Task(
        number,
        f"group {number} of every client",
        unique_labels(groups.chosen),
        source.train,
        source.test,
        partition,
        groups,
        partition.classes_of,
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
        client_rows = self.partition.index(client)
        wanted = torch.from_numpy(self.chosen[client])
        return client_rows[torch.isin(self.labels[client_rows], wanted)]

    def classes_of(self, client: int) -> tuple[int, ...]:
        """Return the classes that a client chose."""
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
        """Return the distinct groups among the rows of `chosen`."""
        distinct, weights = np.unique(chosen, axis=0, return_counts=True)
        top = int(max(test_labels.max(), chosen.max(initial=0)))
        rows = tuple((test_labels == k).nonzero().flatten() for k in range(top + 1))
        return cls(distinct, weights, rows)

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, index: int) -> EvalGroup: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[EvalGroup]: ...
    def __getitem__(self, index: int | slice) -> EvalGroup | Sequence[EvalGroup]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        classes = tuple(int(label) for label in self.chosen[index])
        rows = torch.cat([self.rows[label] for label in classes])
        return EvalGroup(rows, classes, float(self.weights[index]))

    def __iter__(self) -> Iterator[EvalGroup]:
        return (self[index] for index in range(len(self)))
