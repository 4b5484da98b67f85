"""Validation rows: training examples that clients hold out, to select settings on.

A row is held out in every task that uses it and by every client that holds it, so that nothing of
it is trained on. Of every class the same fraction is held out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from perdure.core.rng import Rng
from perdure.data.numbers import class_labels
from perdure.data.partition import Partition
from perdure.data.source import Array
from perdure.data.streams.stream import EvalGroup, Task


def hold_out(task: Task, fraction: float, rng: Rng) -> Task:
    """Return the task with a fraction of its training rows held out for validation.

    Args:
        task: A task whose training rows are all trained on.
        fraction: Fraction of the rows of every class, in [0, 1). A client keeps at least one row.
        rng: Derives the draw, which depends on the labels of the training set alone.
    """
    if not fraction:
        return task
    labels = class_labels(task.train_labels).cpu()
    training = TrainingPartition(task.partition, held_out_rows(labels.numpy(), fraction, rng))
    rows = training.validation_rows()
    groups = [
        EvalGroup(rows[torch.isin(labels[rows], torch.tensor(group.classes))], group.classes,
                  group.weight)
        for group in task.groups
    ]  # fmt: skip
    return replace(task, partition=training, validation=groups)


def held_out_rows(labels: Array, fraction: float, rng: Rng) -> Tensor:
    """Return which rows are held out, bool [rows]: of each class, `fraction` rounded."""
    order = rng.numpy_generator("validation").permutation(len(labels))
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        of_class = order[labels[order] == label]
        held_out[of_class[: round(fraction * len(of_class))]] = True
    return torch.from_numpy(held_out)


@dataclass(frozen=True)
class TrainingPartition:
    """A partition without the rows that are held out."""

    partition: Partition
    """All rows of every client."""
    held_out: Tensor
    """Whether a row of the training set is held out, bool [rows]."""

    @cached_property
    def sizes(self) -> Array:
        """Number of rows per client."""
        return np.array([len(self.index(client)) for client in range(len(self.partition.sizes))])

    def index(self, client: int) -> Tensor:
        """Return the rows that a client trains on; its first row if all are held out."""
        rows = self.partition.index(client)
        trained = rows[~self.held_out[rows]]
        return trained if len(trained) else rows[:1]

    def counts(self, labels: Array, classes: int) -> Array:
        """Return the number of rows per client and class."""
        of_clients = [labels[self.index(client).numpy()] for client in range(len(self.sizes))]
        return np.stack([np.bincount(of_client, minlength=classes) for of_client in of_clients])

    def validation_rows(self) -> Tensor:
        """Return the rows that some client holds and none trains on, int64, sorted."""
        present, trained = torch.zeros_like(self.held_out), torch.zeros_like(self.held_out)
        for client in range(len(self.partition.sizes)):
            present[self.partition.index(client)] = True
            trained[self.index(client)] = True
        return (present & ~trained).nonzero().flatten()
