"""Split streams: every task a group of classes."""

from __future__ import annotations

import logging

import numpy as np

from perdure.config import Config, StreamConfig
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.data.load import model_source
from perdure.data.partition_kinds import make_partition
from perdure.data.source import Array
from perdure.data.streams.joined import joined_source
from perdure.data.streams.stream import (
    NormalizedSource,
    Stream,
    Task,
    normalize_source,
    presence,
    unique_labels,
)

log = logging.getLogger(__name__)


def split_stream(config: Config, rng: Rng) -> Stream:
    """Groups of classes in an order drawn from the seed; neighbours share `overlap` classes.

    The classes are those of data, or of all sources of stream.domains.
    """
    source = (joined_source if config.stream.domains else model_source)(config, rng)
    material = normalize_source(source, config.data)
    order = rng.numpy_generator("classes").permutation(unique_labels(material.labels()))
    groups = class_groups(order, config.stream)
    tasks = [_task(config, material, t, group, rng) for t, group in enumerate(groups)]
    return Stream("split", tasks, source.classes, source.shape)


def _task(
    config: Config, material: NormalizedSource, number: int, classes: tuple[int, ...], rng: Rng
) -> Task:
    labels = material.labels()
    rows = np.flatnonzero(np.isin(labels, classes))
    shares = make_partition(
        labels[rows],
        rows,
        config.clients.count,
        config.clients.partition,
        rng.numpy_generator("partition", number),
        presence(config, number, rng),
    )
    name = "classes " + " ".join(str(label) for label in classes)
    return material.task(number, name, classes, shares)


def class_groups(order: Array, stream: StreamConfig) -> list[tuple[int, ...]]:
    """The classes of every task, each group sorted."""
    size = group_size(len(order), stream)
    step = size - stream.overlap
    unused = len(order) - (size + (stream.tasks - 1) * step)
    if unused and stream.classes_per_task is None:
        log.warning(
            "stream.tasks: %d tasks of %d classes leave %d of the %d classes unused",
            stream.tasks, size, unused, len(order),
        )  # fmt: skip
    starts = [task * step for task in range(stream.tasks)]
    return [tuple(sorted(int(label) for label in order[s : s + size])) for s in starts]


def group_size(classes: int, stream: StreamConfig) -> int:
    """Classes in a task: stream.classes_per_task, or as many as go into the tasks."""
    tasks, overlap = stream.tasks, stream.overlap
    if tasks > classes:
        raise bad_value("stream.tasks", tasks, f"1 to {classes}, the number of classes")
    most = (classes + (tasks - 1) * overlap) // tasks
    size = stream.classes_per_task or most
    if overlap >= size and tasks > 1:
        raise bad_value("stream.overlap", overlap, f"0 to {size - 1} ({size} classes in a task)")
    if size > most:
        allowed = f"1 to {most} ({classes} classes, {tasks} tasks, overlap {overlap})"
        raise bad_value("stream.classes_per_task", size, allowed)
    return size
