"""Partitions: which examples of a task each client holds, computed on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perdure.data.source import Array


class Partition(Protocol):
    """Which rows of a task's training set each client holds."""

    @property
    def sizes(self) -> Array:
        """Number of rows per client, int [clients]."""
        ...

    def index(self, client: int) -> Tensor:
        """Return the rows of a client, int64 [rows of the client]."""
        ...

    def counts(self, labels: Array, classes: int) -> Array:
        """Return the number of rows per client and class, int [clients, classes].

        Args:
            labels: Labels of the training set, int [rows].
            classes: Size of the label space.
        """
        ...


@dataclass(frozen=True)
class DisjointPartition:
    """A partition in which no row is held by two clients."""

    rows: Tensor
    """The rows of all clients, those of client 0 first, int64."""
    offsets: Array
    """Position in `rows` where each client begins, int [clients + 1]."""

    @property
    def sizes(self) -> Array:
        """Number of rows per client."""
        return np.diff(self.offsets)

    def index(self, client: int) -> Tensor:
        """Return the rows of a client, as a view."""
        return self.rows[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def counts(self, labels: Array, classes: int) -> Array:
        """Return the number of rows per client and class."""
        sizes = self.sizes
        owner = np.repeat(np.arange(len(sizes)), sizes)
        cells = owner * classes + labels[self.rows.numpy()]
        return np.bincount(cells, minlength=len(sizes) * classes).reshape(len(sizes), classes)


@dataclass(frozen=True)
class SharedClassPartition:
    """A partition in which each client holds all rows of its classes, as other clients may too."""

    rows: Tensor
    """The rows of the task, those of its first class first, int64."""
    offsets: Array
    """Position in `rows` where each class begins, int [classes of the task + 1]."""
    labels: Array
    """The label of each class of the task."""
    holds: Array
    """Whether a client holds a class, bool [clients, classes of the task]."""

    @property
    def sizes(self) -> Array:
        """Number of rows per client."""
        return self.holds @ np.diff(self.offsets)

    def index(self, client: int) -> Tensor:
        """Return the rows of a client, by class."""
        by_class = [
            self.rows[int(self.offsets[k]) : int(self.offsets[k + 1])]
            for k in np.flatnonzero(self.holds[client])
        ]
        return torch.cat(by_class) if by_class else self.rows[:0]

    def counts(self, labels: Array, classes: int) -> Array:
        """Return the number of rows per client and class."""
        table = np.zeros((len(self.holds), classes), np.int64)
        table[:, self.labels] = self.holds * np.diff(self.offsets)
        return table


@dataclass(frozen=True)
class PresentPartition:
    """A partition in which absent clients hold nothing."""

    partition: Partition
    """The partition if all clients were present."""
    present: Array
    """Whether a client is present, bool [clients]."""

    @property
    def sizes(self) -> Array:
        """Number of rows per client."""
        return np.where(self.present, self.partition.sizes, 0)

    def index(self, client: int) -> Tensor:
        """Return the rows of a client."""
        rows = self.partition.index(client)
        return rows if self.present[client] else rows[:0]

    def counts(self, labels: Array, classes: int) -> Array:
        """Return the number of rows per client and class."""
        return self.partition.counts(labels, classes) * self.present[:, None]


@dataclass(frozen=True)
class LargePartition:
    """A partition in which clients with too few rows hold nothing."""

    partition: Partition
    """The partition of all clients, whose sizes may not be known yet."""
    min_rows: int
    """Rows that a client must have."""

    @property
    def sizes(self) -> Array:
        """Number of rows per client."""
        return self._present.sizes

    def index(self, client: int) -> Tensor:
        """Return the rows of a client."""
        rows = self.partition.index(client)
        return rows if len(rows) >= self.min_rows else rows[:0]

    def counts(self, labels: Array, classes: int) -> Array:
        """Return the number of rows per client and class."""
        return self._present.counts(labels, classes)

    @property
    def _present(self) -> PresentPartition:
        return PresentPartition(self.partition, self.partition.sizes >= self.min_rows)


def small_clients(partition: Partition) -> dict[int, int]:
    """Return the clients that hold nothing because they have too few rows, with these rows."""
    if not isinstance(partition, LargePartition):
        return {}
    sizes = partition.partition.sizes
    small = np.flatnonzero((sizes > 0) & (sizes < partition.min_rows))
    return {int(client): int(sizes[client]) for client in small}


def present_only(partition: Partition, present: Array | None) -> Partition:
    """Return the partition over the present clients, bool [clients]. If None, all are present."""
    return partition if present is None else PresentPartition(partition, present)
