"""Ways to divide the rows of a task among the clients: one class per kind of partition."""

from __future__ import annotations

import heapq
import math
from typing import ClassVar

import numpy as np
import torch

from perdure.config.clients import ROUNDING, PartitionConfig
from perdure.config.section import Fraction, PositiveFloat, PositiveInt, Text
from perdure.core.errors import UserError, bad_value
from perdure.core.registry import Registry
from perdure.data.examples import Array
from perdure.data.partition import (
    DisjointPartition,
    Partition,
    PresentPartition,
    SharedClassPartition,
    TaskRows,
)

PARTITIONS: Registry[PartitionConfig] = Registry(
    key="clients.partition.kind",
    base=PartitionConfig,
    base_name="perdure.config.PartitionConfig",
    group="perdure.partitions",
    builtin={
        "iid": "perdure.data.partition_kinds.IidPartition",
        "dirichlet": "perdure.data.partition_kinds.DirichletPartition",
        "shards": "perdure.data.partition_kinds.ShardsPartition",
        "classes": "perdure.data.partition_kinds.ClassesPartition",
        "column": "perdure.data.partition_kinds.ColumnPartition",
        "folder": "perdure.data.partition_kinds.FolderPartition",
    },
)


class IidPartition(PartitionConfig):
    """Every client holds an equally large random sample of a task.

    Example: `partition: {kind: iid}`
    """

    def divide(self, task: TaskRows, rng: np.random.Generator) -> Partition:
        """Return a random partition into equal parts."""
        sizes = _even(len(task.rows), len(task.present))
        return task.divided(rng.permutation(task.rows), sizes)


class DirichletPartition(PartitionConfig):
    """Each class is divided in proportions drawn from a Dirichlet distribution.

    Example: `partition: {kind: dirichlet, alpha: 0.5}`
    """

    needs_classes: ClassVar[bool] = True

    alpha: PositiveFloat = 0.5
    """Concentration of the Dirichlet distribution; small values make clients unequal."""

    def divide(self, task: TaskRows, rng: np.random.Generator) -> Partition:
        """Divide every class in drawn proportions, then fill the empty clients."""
        classes, class_positions = np.unique(task.labels, return_inverse=True)
        totals = np.bincount(class_positions, minlength=len(classes))
        parts = len(task.present)
        table = np.stack([_dirichlet_counts(total, parts, self.alpha, rng) for total in totals])
        fill_empty(table)
        return task.divided(*_deal(task.rows, class_positions, table, rng))


class ShardsPartition(PartitionConfig):
    """Examples are sorted by label and cut into shards; each client holds some of them.

    Example: `partition: {kind: shards, per_client: 2}`
    """

    needs_classes: ClassVar[bool] = True

    per_client: PositiveInt = 2
    """Shards per client."""

    def divide(self, task: TaskRows, rng: np.random.Generator) -> Partition:
        """Sort by label, cut into equal shards, deal each client its shards at random."""
        rows, parts, each = task.rows, len(task.present), self.per_client
        if len(rows) < parts * each:
            allowed = f"at most {len(rows) // parts} ({len(rows)} training rows, {parts} clients)"
            raise bad_value("clients.partition.per_client", each, allowed)
        mixed = rng.permutation(len(rows))
        order = rows[mixed[np.argsort(task.labels[mixed], kind="stable")]]
        ends = np.cumsum(_even(len(rows), parts * each))
        starts = np.concatenate([[0], ends[:-1]])
        dealt = rng.permutation(parts * each)
        sizes = (ends - starts)[dealt].reshape(parts, each).sum(1)
        return task.divided(np.concatenate([order[starts[s] : ends[s]] for s in dealt]), sizes)


class ClassesPartition(PartitionConfig):
    """Each client holds some of a task's classes.

    Example: `partition: {kind: classes, fraction: 0.6}`
    """

    needs_classes: ClassVar[bool] = True

    fraction: Fraction = 0.6
    """Fraction of a task's classes that a client holds, rounded up: 0.6 is 6 of 10 and 2 of 2."""
    disjoint: bool = False
    """Divide the examples of a class among the clients that hold it. If false, each of them holds
    all."""

    def fewest_rows(self, clients: int) -> int:
        """Return one row per client if no two of them hold the same."""
        return clients if self.disjoint else 1

    def divide(self, task: TaskRows, rng: np.random.Generator) -> Partition:
        """Draw the classes of each client, and divide their rows if they are disjoint."""
        classes, class_positions = np.unique(task.labels, return_inverse=True)
        each = max(math.ceil(self.fraction * len(classes) - ROUNDING), 1)
        holds = random_assignment(len(task.present), len(classes), each, rng)
        totals = np.bincount(class_positions, minlength=len(classes))
        if self.disjoint:
            return self._disjoint(task, holds, class_positions, totals, rng)
        held = np.zeros((task.clients, len(classes)), bool)
        held[task.present] = holds
        order = task.rows[np.argsort(class_positions, kind="stable")]
        ends = np.concatenate([[0], np.cumsum(totals)])
        return SharedClassPartition(torch.from_numpy(order), ends, classes, held)

    def _disjoint(
        self,
        task: TaskRows,
        holds: Array,
        class_positions: Array,
        totals: Array,
        rng: np.random.Generator,
    ) -> Partition:
        """Those who share a class divide it evenly; what is left over goes to the poorest."""
        parts = len(task.present)
        table = np.zeros((len(totals), parts), np.int64)
        for label in np.argsort(-totals / np.maximum(holds.sum(0), 1), kind="stable"):
            holders = rng.permutation(np.flatnonzero(holds[:, label]))
            if len(holders):
                poorest = holders[np.argsort(table[:, holders].sum(0), kind="stable")]
                table[label, poorest] = _even(totals[label], len(holders))
        if (table.sum(0) == 0).any():
            raise UserError(
                f"clients.count: must be smaller, since dividing {len(task.rows)} rows by "
                f"clients.partition.fraction {self.fraction} leaves a client without any, "
                f"got {parts}"
            )
        taken = table.sum(axis=1) > 0  # with few clients, a class may have no holder
        held_rows = np.flatnonzero(taken[class_positions])
        return task.divided(*_deal(task.rows[held_rows], class_positions[held_rows], table, rng))


class NaturalPartition(PartitionConfig):
    """The data says who the clients are, and what each of them holds."""

    is_natural: ClassVar[bool] = True

    def fewest_rows(self, clients: int) -> int:
        """Return 0: a client may hold nothing of a task."""
        return 0

    def divide(self, task: TaskRows, rng: np.random.Generator) -> Partition:
        """Give every row to the client that the data names."""
        if task.owners is None:
            expected = "another kind, since no rows name clients"
            raise bad_value("clients.partition.kind", self.kind, expected)
        if len(task.owners) and task.owners.max() >= task.clients:
            expected = f"{task.owners.max() + 1} or more, as in the data"
            raise bad_value("clients.count", task.clients, expected)
        order = np.argsort(task.owners, kind="stable")
        sizes = np.bincount(task.owners, minlength=task.clients)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        partition = DisjointPartition(torch.from_numpy(task.rows[order]), offsets)
        if len(task.present) == task.clients:
            return partition
        return PresentPartition(partition, np.isin(np.arange(task.clients), task.present))


class ColumnPartition(NaturalPartition):
    """The data names the client of every row, such as the hospital of a patient.

    Example: `partition: {kind: column, name: hospital}`
    """

    name: Text = "client"
    """Column of a table or Hugging Face data set, field of JSON lines, or array of an npz file."""

    @property
    def column(self) -> str | None:
        """The column that names the client."""
        return self.name


class FolderPartition(NaturalPartition):
    """Every client has a folder: client/class/image, or client/domain/class/image.

    Example: `partition: {kind: folder}`
    """

    in_folders: ClassVar[bool] = True


# ---- What several kinds are made of


def _even(total: int, parts: int) -> Array:
    """Sizes that add up to `total` and differ by at most one."""
    sizes = np.full(parts, total // parts, np.int64)
    sizes[: total % parts] += 1
    return sizes


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
