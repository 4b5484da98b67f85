"""Augmented images in local steps: each client draws its random numbers as it would alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from perdure.contract.context import Client
from perdure.contract.local_training import LocalTraining
from perdure.contract.step import Batch


def augmentation_draws(
    training: LocalTraining, client: Client, steps: int, rows: int
) -> Tensor | None:
    """Return the random numbers of a client's images in a round.

    Args:
        training: What all clients of the round share.
        client: The client.
        steps: Its local steps.
        rows: Rows of a batch.

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
    black = client.data.inputs.black
    return replace(batch, x=training.augmentation.apply(batch.x, draws[: len(batch.y)], black))
