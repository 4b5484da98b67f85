"""Partitions: which examples of a task each client holds, computed on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perdure.config import ClientsConfig, Config, PartitionConfig
from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.examples import Array, Examples
from perdure.data.labels import class_labels

# ---- Partitions: which examples of a task each client holds, computed on demand


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


# ---- Dividing the rows of a task: by the kind of partition, among the clients that see the task.


@dataclass(frozen=True)
class TaskRows:
    """The training rows of a task, and the clients that they are divided among."""

    rows: Array
    """Positions in the training set, int64 [rows]."""
    labels: Array
    """Label of each row, int [rows]."""
    clients: int
    """Number of clients, with those that do not see the task."""
    present: Array
    """The clients that see the task, int [present clients]."""
    owners: Array | None = None
    """The client of each row, int [rows]. If None, the data does not name clients."""

    def divided(self, order: Array, sizes: Array) -> DisjointPartition:
        """Return the partition in which the present clients hold `order`, piece by piece.

        Args:
            order: Positions in the training set, int64: those of the first present client first.
            sizes: Rows of each present client.

        """
        offsets = np.zeros(self.clients + 1, np.int64)
        offsets[self.present + 1] = sizes
        return DisjointPartition(torch.from_numpy(order), np.cumsum(offsets))


def partition_once(examples: Examples, clients: ClientsConfig, rng: Rng) -> Partition:
    """Divide all training examples of a source over all clients, for every task of a stream."""
    generator = rng.numpy_generator("partition", 0)
    labels, rows = class_labels(examples.y).numpy(), np.arange(len(examples))
    owners = None if examples.clients is None else examples.clients.numpy()
    return make_partition(labels, rows, clients.count, clients.partition, generator, owners=owners)


def presence(config: Config, task: int, rng: Rng) -> Array | None:
    """Return the clients that see a task, as bool [clients], or None if all do.

    The fraction stream.presence of the clients sees a task, rounded, and at least one client. Each
    task has a separate draw, so that it does not depend on how many tasks follow: on average, a
    client sees that fraction of the tasks, which may be all of a short stream or none of it.
    """
    clients = config.clients.count
    count = max(1, round(config.stream.presence * clients))
    if count == clients:
        return None
    chosen = rng.numpy_generator("presence", task).choice(clients, count, replace=False)
    present = np.zeros(clients, bool)
    present[chosen] = True
    return present


def present_in_task(partition: Partition, config: Config, task: int, rng: Rng) -> Partition:
    """Return the partition over the clients that see a task."""
    return present_only(partition, presence(config, task, rng))


def make_partition(
    labels: Array,
    rows: Array,
    clients: int,
    config: PartitionConfig,
    rng: np.random.Generator,
    present: Array | None = None,
    owners: Array | None = None,
) -> Partition:
    """Divide `rows`, whose labels are `labels`, over the clients that are present.

    Args:
        labels: Labels of the rows, int [rows].
        rows: Positions in the training set, int [rows].
        clients: Number of clients.
        config: How rows are divided.
        rng: Generator of the draws.
        present: Which clients are present, bool [clients]. If None, all are.
        owners: The client of each row, int [rows], for a partition by column or folder.

    """
    present_clients = np.arange(clients) if present is None else np.flatnonzero(present)
    if len(rows) < config.fewest_rows(len(present_clients)):
        raise _too_many(clients, len(present_clients), len(rows))
    positions = np.asarray(rows, np.int64)
    task = TaskRows(positions, np.asarray(labels), clients, present_clients, owners)
    partition: Partition = config.divide(task, rng)
    return partition


def _too_many(clients: int, present_clients: int, rows: int) -> UserError:
    """Return the error for more clients than rows."""
    allowed = f"at most {rows}, the training rows of a task"
    if present_clients < clients:
        allowed = f"so many that {rows} or fewer see a task, its training rows; "
        allowed += f"by stream.presence {present_clients} do"
    return bad_value("clients.count", clients, allowed)
