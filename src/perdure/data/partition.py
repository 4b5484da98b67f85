"""What clients hold: a few small arrays, from which a client's rows are found when asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from perdure.data.source import Array


class Partition(Protocol):
    """The rows of a task's training set that each client holds."""

    @property
    def sizes(self) -> Array:
        """Rows of each client, int [clients]; 0: the client holds nothing."""
        ...

    def index(self, client: int) -> Tensor:
        """Row numbers of a client, int64."""
        ...

    def counts(self, labels: Array, classes: int) -> Array:
        """How many rows of each class each client holds, int [clients, classes]."""
        ...


@dataclass(frozen=True)
class DisjointPartition:
    """Rows in one order, cut into one piece a client: no row is held twice."""

    rows: Tensor
    offsets: Array

    @property
    def sizes(self) -> Array:
        """Rows of each client."""
        return np.diff(self.offsets)

    def index(self, client: int) -> Tensor:
        """Row numbers of a client: a view, which costs no memory."""
        return self.rows[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def counts(self, labels: Array, classes: int) -> Array:
        """Rows of each class at each client."""
        sizes = self.sizes
        owner = np.repeat(np.arange(len(sizes)), sizes)
        cells = owner * classes + labels[self.rows.numpy()]
        return np.bincount(cells, minlength=len(sizes) * classes).reshape(len(sizes), classes)


@dataclass(frozen=True)
class SharedClassPartition:
    """Rows grouped by class; a client holds all rows of its classes, together with others."""

    rows: Tensor
    offsets: Array
    """Where each class begins in `rows`, [classes + 1]."""
    labels: Array
    """The label of each class of the task."""
    holds: Array
    """bool [clients, classes of the task]"""

    @property
    def sizes(self) -> Array:
        """Rows of each client."""
        return self.holds @ np.diff(self.offsets)

    def index(self, client: int) -> Tensor:
        """Row numbers of a client, put together on demand."""
        parts = [
            self.rows[int(self.offsets[k]) : int(self.offsets[k + 1])]
            for k in np.flatnonzero(self.holds[client])
        ]
        return torch.cat(parts) if parts else self.rows[:0]

    def counts(self, labels: Array, classes: int) -> Array:
        """Rows of each class at each client."""
        table = np.zeros((len(self.holds), classes), np.int64)
        table[:, self.labels] = self.holds * np.diff(self.offsets)
        return table


@dataclass(frozen=True)
class PresentPartition:
    """The shares of those who are present; the others hold nothing."""

    partition: Partition
    present: Array

    @property
    def sizes(self) -> Array:
        """Rows of each client."""
        return np.where(self.present, self.partition.sizes, 0)

    def index(self, client: int) -> Tensor:
        """Row numbers of a client."""
        held = self.partition.index(client)
        return held if self.present[client] else held[:0]

    def counts(self, labels: Array, classes: int) -> Array:
        """Rows of each class at each client."""
        return self.partition.counts(labels, classes) * self.present[:, None]


def present_only(shares: Partition, present: Array | None) -> Partition:
    """The shares of those who are present, bool [clients]; None: of all."""
    return shares if present is None else PresentPartition(shares, present)
