"""Permuted streams: the same images in every task, their pixels in another order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.data.load import model_source
from perdure.data.partition import Partition, present_only
from perdure.data.partition_kinds import make_partition
from perdure.data.streams.stream import (
    NormalizedSource,
    Stream,
    Task,
    normalize_source,
    presence,
    unique_labels,
)


def permuted_stream(config: Config, rng: Rng) -> Stream:
    """Task 0 has the images as they are; each later one a permutation drawn from the seed.

    The images are divided over the clients once: a client has the same ones in every task.
    """
    if config.model.kind == "text":
        allowed = "split, domains or pool with model.kind text, since words have an order"
        raise bad_value("stream.kind", "permuted", allowed)
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
    tasks = [
        _task(material, t, present_only(shares, presence(config, t, rng)), rng)
        for t in range(config.stream.tasks)
    ]
    return Stream("permuted", tasks, source.classes, source.shape)


def _task(material: NormalizedSource, number: int, shares: Partition, rng: Rng) -> Task:
    order = permutation(number, material.train.rows.shape[1], rng)
    seen = NormalizedSource(
        material.train.permuted(order),
        material.train_labels,
        material.test.permuted(order),
        material.test_labels,
    )
    name = "as they are" if order is None else f"permutation {number}"
    return seen.task(number, name, unique_labels(material.labels()), shares)


def permutation(task: int, width: int, rng: Rng) -> Tensor | None:
    """The order of the pixels in a task; None: as they are."""
    if task == 0:
        return None
    return torch.randperm(width, generator=rng.torch_generator("permutation", task))
