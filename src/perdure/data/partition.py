"""Partitions: which examples of a task each client holds, computed on demand."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perdure.config import ROUNDING, ClientsConfig, Config, PartitionConfig
from perdure.config import clients as kinds
from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.examples import Array, Examples
from perdure.data.labels import class_labels

# ------------------------------------------------------------------------------------------------
# Partitions: which examples of a task each client holds, computed on demand.
# ------------------------------------------------------------------------------------------------


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


# ------------------------------------------------------------------------------------------------
# Ways to divide the rows of a task among the clients.
# ------------------------------------------------------------------------------------------------


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
    if isinstance(config, kinds.NaturalPartition):
        return present_only(_natural(rows, owners, clients, config.kind), present)
    present_clients = np.arange(clients) if present is None else np.flatnonzero(present)
    common = isinstance(config, kinds.ClassesPartition) and not config.disjoint
    if not len(rows) or (len(rows) < len(present_clients) and not common):
        raise _too_many(clients, len(present_clients), len(rows))
    rows, labels = np.asarray(rows, np.int64), np.asarray(labels)
    match config:
        case kinds.IidPartition():
            order, sizes = _iid(rows, len(present_clients), rng)
        case kinds.DirichletPartition(alpha=alpha):
            order, sizes = _dirichlet(rows, labels, len(present_clients), alpha, rng)
        case kinds.ShardsPartition(per_client=shards):
            order, sizes = _shards(rows, labels, len(present_clients), shards, rng)
        case kinds.ClassesPartition(fraction=fraction, disjoint=False):
            return _common(rows, labels, clients, present_clients, fraction, rng)
        case kinds.ClassesPartition(fraction=fraction):
            order, sizes = _disjoint(rows, labels, len(present_clients), fraction, rng)
    return _cut(order, sizes, clients, present_clients)


def _too_many(clients: int, present_clients: int, rows: int) -> UserError:
    """Return the error for more clients than rows."""
    allowed = f"at most {rows}, the training rows of a task"
    if present_clients < clients:
        allowed = f"so many that {rows} or fewer see a task, its training rows; "
        allowed += f"by stream.presence {present_clients} do"
    return bad_value("clients.count", clients, allowed)


def _natural(rows: Array, owners: Array | None, clients: int, kind: str) -> DisjointPartition:
    """Give every row to the client that the data names."""
    if owners is None:
        raise bad_value("clients.partition.kind", kind, "another kind, since no rows name clients")
    if len(owners) and owners.max() >= clients:
        raise bad_value("clients.count", clients, f"{owners.max() + 1} or more, as in the data")
    order = np.argsort(owners, kind="stable")
    sizes = np.bincount(owners, minlength=clients)
    sorted_rows = torch.from_numpy(np.asarray(rows, np.int64)[order])
    return DisjointPartition(sorted_rows, np.concatenate([[0], np.cumsum(sizes)]))


def _cut(order: Array, sizes: Array, clients: int, present_clients: Array) -> DisjointPartition:
    """Pieces for those who are there, in their order; empty ones for the rest."""
    offsets = np.zeros(clients + 1, np.int64)
    offsets[present_clients + 1] = sizes
    return DisjointPartition(torch.from_numpy(order), np.cumsum(offsets))


def _iid(rows: Array, parts: int, rng: np.random.Generator) -> tuple[Array, Array]:
    return rng.permutation(rows), _even(len(rows), parts)


def _even(total: int, parts: int) -> Array:
    """Sizes that add up to `total` and differ by at most one."""
    sizes = np.full(parts, total // parts, np.int64)
    sizes[: total % parts] += 1
    return sizes


def _shards(
    rows: Array, labels: Array, parts: int, each: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Sort by label, cut into parts * each shards, deal each client its shards at random."""
    if len(rows) < parts * each:
        allowed = f"at most {len(rows) // parts} ({len(rows)} training rows, {parts} clients)"
        raise bad_value("clients.partition.per_client", each, allowed)
    mixed = rng.permutation(len(rows))
    order = rows[mixed[np.argsort(labels[mixed], kind="stable")]]
    ends = np.cumsum(_even(len(rows), parts * each))
    starts = np.concatenate([[0], ends[:-1]])
    dealt = rng.permutation(parts * each)
    sizes = (ends - starts)[dealt].reshape(parts, each).sum(1)
    return np.concatenate([order[starts[s] : ends[s]] for s in dealt]), sizes


def _dirichlet(
    rows: Array, labels: Array, parts: int, alpha: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Divide every class over the clients in Dirichlet(alpha) proportions, then fill the empty."""
    classes, class_positions = np.unique(labels, return_inverse=True)
    totals = np.bincount(class_positions, minlength=len(classes))
    table = np.stack([_dirichlet_counts(total, parts, alpha, rng) for total in totals])
    fill_empty(table)
    return _deal(rows, class_positions, table, rng)


def _dirichlet_counts(total: int, parts: int, alpha: float, rng: np.random.Generator) -> Array:
    """`total` rows in Dirichlet(alpha) proportions, by the logarithms of Gamma(alpha) draws.

    Gamma(alpha) is Gamma(alpha + 1) * U^(1/alpha), whose logarithm is finite for every alpha at
    which alpha itself is; after the largest is taken off, one weight is exp(0) = 1, so the weights
    never all vanish, which plain Gamma draws do for a small alpha.
    """
    uniform = 1.0 - rng.random(parts)  # in (0, 1]: its logarithm is finite
    alpha = min(alpha, 1e12)  # equal proportions, for all purposes; infinity has no draws
    logs = np.log(rng.standard_gamma(alpha + 1.0, parts)) + np.log(uniform) / alpha
    weights = np.exp(np.maximum(logs, -1e300) - max(logs.max(), -1e300))
    ends = np.floor(np.cumsum(weights) / weights.sum() * total + 0.5).astype(np.int64)
    ends[-1] = total
    return np.diff(np.minimum(ends, total), prepend=0)


def fill_empty(table: Array) -> None:
    """Give every client (column) a row, by moving single rows from the richest; in place.

    It ends after at most one move for each client, whatever the table, if there are at least as
    many rows as clients: while one client is empty, the others, fewer than there are rows, hold
    all of them, so the richest holds two or more. A move takes one row of its largest class: it
    keeps one or more, hence no client becomes empty and one stops being so.
    """
    sizes = table.sum(0)
    richest = [(-int(size), client) for client, size in enumerate(sizes) if size > 1]
    heapq.heapify(richest)
    for client in np.flatnonzero(sizes == 0):
        negative, donor = heapq.heappop(richest)
        label = int(table[:, donor].argmax())
        table[label, donor] -= 1
        table[label, client] += 1
        if negative + 1 < -1:
            heapq.heappush(richest, (negative + 1, donor))


def _deal(
    rows: Array, class_positions: Array, table: Array, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Hand out each class's rows, in random order, by a table [classes, clients] of counts."""
    owner = np.empty(len(rows), np.int64)
    mixed = rng.permutation(len(rows))
    by_class = mixed[np.argsort(class_positions[mixed], kind="stable")]
    owner[by_class] = np.concatenate([np.repeat(np.arange(len(c)), c) for c in table])
    return rows[np.argsort(owner, kind="stable")], table.sum(0)


def _common(
    rows: Array,
    labels: Array,
    clients: int,
    present_clients: Array,
    fraction: float,
    rng: np.random.Generator,
) -> SharedClassPartition:
    classes, class_positions = np.unique(labels, return_inverse=True)
    holds = np.zeros((clients, len(classes)), bool)
    holds[present_clients] = random_assignment(
        len(present_clients), len(classes), _share(fraction, len(classes)), rng
    )
    ends = np.cumsum(np.bincount(class_positions, minlength=len(classes)))
    order = rows[np.argsort(class_positions, kind="stable")]
    return SharedClassPartition(
        torch.from_numpy(order), np.concatenate([[0], ends]), classes, holds
    )


def _disjoint(
    rows: Array, labels: Array, parts: int, fraction: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Those who share a class divide its rows evenly; what is left over goes to the poorest."""
    classes, class_positions = np.unique(labels, return_inverse=True)
    totals = np.bincount(class_positions, minlength=len(classes))
    holds = random_assignment(parts, len(classes), _share(fraction, len(classes)), rng)
    table = np.zeros((len(classes), parts), np.int64)
    for label in np.argsort(-totals / np.maximum(holds.sum(0), 1), kind="stable"):
        holders = rng.permutation(np.flatnonzero(holds[:, label]))
        if len(holders):
            poorest = holders[np.argsort(table[:, holders].sum(0), kind="stable")]
            table[label, poorest] = _even(totals[label], len(holders))
    if (table.sum(0) == 0).any():
        raise UserError(
            f"clients.count: must be smaller, since dividing {len(rows)} rows by "
            f"clients.partition.fraction {fraction} leaves a client without any, got {parts}"
        )
    taken = table.sum(axis=1) > 0  # with few clients, a class may have no holder
    held_rows = np.flatnonzero(taken[class_positions])
    return _deal(rows[held_rows], class_positions[held_rows], table, rng)


def _share(fraction: float, classes: int) -> int:
    """Return the number of classes of a client: the fraction, rounded up."""
    return max(math.ceil(fraction * classes - ROUNDING), 1)


def random_assignment(parts: int, options: int, each: int, rng: np.random.Generator) -> Array:
    """Return a table [parts, options] of `each` random options per part that covers all options.

    Options that nobody drew replace, one by one, an option that two parts or more hold. There is
    one as long as parts * each >= options: fewer options than holdings are covered then, so one is
    held twice. A replacement uncovers nothing, so this ends after at most `options` of them; with
    fewer holdings than options it ends once all holdings are of different options.
    """
    ranks = rng.random((parts, options)).argsort(axis=1)
    holds = np.zeros((parts, options), bool)
    np.put_along_axis(holds, ranks[:, :each], True, axis=1)
    for missing in np.flatnonzero(~holds.any(0)):
        most = int(holds.sum(0).argmax())
        if holds[:, most].sum() < 2:
            break
        part = rng.choice(np.flatnonzero(holds[:, most]))
        holds[part, most], holds[part, missing] = False, True
    return holds
