"""The batches of a client's local steps, their augmentation and random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perdure.config import TrainConfig
from perdure.contract.context import Client
from perdure.contract.step import Batch
from perdure.training.local_training import LocalTraining

# ------------------------------------------------------------------------------------------------
# The batches of a client's local steps, and the seed of their random numbers.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of a client's local steps, as row numbers of the task's training set."""

    rows: Tensor
    """int64 [steps, batch]: an incomplete batch is padded with one of the client's rows."""
    sizes: list[int]
    """Number of rows of each batch that are not padding."""
    epochs: Tensor
    """int64 [steps]: the epoch of each step, from 0."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Tensor]:
        for rows, size in zip(self.rows, self.sizes, strict=True):
            yield rows if size == len(rows) else rows[:size]


def batch_schedule(client: Client, config: TrainConfig) -> BatchSchedule:
    """Return a client's batches of one round: its rows, shuffled in every epoch."""
    generator, index, size = client.draw("batches"), client.data.index, config.batch_size
    steps, last_size = -(-len(index) // size), len(index) % size or size
    epochs = config.local_epochs
    if config.max_steps is not None:
        epochs = min(epochs, -(-config.max_steps // steps))
    rows = index[:1].expand(epochs, steps * size).clone()
    for epoch in range(epochs):
        order = torch.randperm(len(index), generator=generator)
        rows[epoch, : len(index)] = index[order.to(index.device)]
    sizes = ([size] * (steps - 1) + [last_size]) * epochs
    numbers = torch.arange(epochs, device=index.device).repeat_interleave(steps)
    limit = config.max_steps
    return BatchSchedule(rows.view(epochs * steps, size)[:limit], sizes[:limit], numbers[:limit])


def first_dropout_seed(client: Client) -> int:
    """Return the client's first dropout seed in this round; step s uses seed + s."""
    context = client.context
    return context.rng.key("dropout", context.task, context.round, client.id) >> 1


# ------------------------------------------------------------------------------------------------
# Augmented images in local steps: each client draws its random numbers as it would alone.
# ------------------------------------------------------------------------------------------------


def augmentation_draws(
    training: LocalTraining, client: Client, steps: int, rows: int
) -> Tensor | None:
    """Return the random numbers of a client's images in a round.

    Returns:
        float [steps, rows, draws], uniform in [0, 1). None if images are not changed.

    """
    if training.augmentation is None:
        return None
    shape = (steps, rows, training.augmentation.draws)
    return torch.rand(shape, generator=client.draw("augment"))


def augmented(training: LocalTraining, client: Client, batch: Batch, draws: Tensor | None) -> Batch:
    """Return a client's batch with changed images; `draws` is [at least rows, draws] or None."""
    if draws is None or training.augmentation is None:
        return batch
    black = client.data.examples.black
    return replace(batch, x=training.augmentation.apply(batch.x, draws[: len(batch.y)], black))
