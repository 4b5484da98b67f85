"""Split streams: every task has its group of classes."""

from __future__ import annotations

import logging
from typing import ClassVar

import numpy as np

from perdure.config import Config, StreamConfig
from perdure.config.section import Item, NonNegativeInt, PositiveInt
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.data.examples import Array
from perdure.data.load import load_model_source
from perdure.data.normalization import normalize_source
from perdure.data.streams.cumulative import joined_source
from perdure.data.streams.domains import SourcesStream, find_items
from perdure.data.streams.stream import Stream, divide_task, label_array, unique_labels

log = logging.getLogger(__name__)


class SplitStream(SourcesStream):
    """Every task has its group of classes, in an order drawn from the seed or given.

    The classes are those of `data`, or of all sources in `domains` together.

    Example: `stream: {kind: split, tasks: 5, classes_per_task: 2}`
    """

    classes_per_task: PositiveInt | None = None
    """Classes per task. Default: as many as go evenly into the tasks; the rest is unused."""
    overlap: NonNegativeInt = 0
    """Classes that consecutive tasks share."""
    order: list[Item] | None = None
    """Labels (from 0) or names of the classes in the order of the tasks; others are not used.
    Default: all classes, in an order drawn from the seed."""

    resembles: ClassVar[str] = "split"
    separates_classes: ClassVar[bool] = True

    @property
    def is_open(self) -> bool:
        """Whether the number of classes per task is found from the number of tasks."""
        return self.classes_per_task is None

    def fixed(self, stream: Stream) -> StreamConfig:
        """Return the section with the number of classes per task of a stream."""
        return with_group_size(self, stream)

    def build(self, config: Config, rng: Rng) -> Stream:
        """Return the stream of a config."""
        if self.domains:
            source = joined_source(self.domains, self.labels, config, rng)
        else:
            source = load_model_source(config, rng)
        normalized = normalize_source(source, config.data)
        labels = unique_labels(label_array(normalized.train))
        if self.order is None:
            order = rng.numpy_generator("classes").permutation(labels)
        else:
            order = np.array(find_items(self.order, source.class_names, labels, "classes"))
        groups = class_groups(order, self)
        tasks = [
            divide_task(config, normalized, t, _name(group, source.class_names), rng, group)
            for t, group in enumerate(groups)
        ]
        return Stream.of("split", tasks, source)


def _name(classes: tuple[int, ...], names: tuple[str, ...]) -> str:
    separator = ", " if any(" " in names[label] for label in classes) else " "
    return "classes " + separator.join(names[label] for label in classes)


def class_groups(order: Array, stream: SplitStream) -> list[tuple[int, ...]]:
    """Return the classes of every task, each group sorted."""
    size = group_size(len(order), stream.tasks, stream.classes_per_task, stream.overlap)
    step = size - stream.overlap
    unused = len(order) - (size + (stream.tasks - 1) * step)
    if unused and stream.classes_per_task is None:
        log.warning(
            "stream.tasks: %d tasks of %d classes leave %d of the %d classes unused",
            stream.tasks, size, unused, len(order),
        )  # fmt: skip
    starts = [task * step for task in range(stream.tasks)]
    return [tuple(sorted(int(label) for label in order[s : s + size])) for s in starts]


def with_group_size(section: StreamConfig, stream: Stream) -> StreamConfig:
    """Return a section with the number of classes per task that a stream of it has."""
    size = len(stream.tasks[0].groups[0].classes)
    return section.model_copy(update={"classes_per_task": size})


def group_size(classes: int, tasks: int, per_task: int | None, overlap: int = 0) -> int:
    """Return the classes per task: `per_task`, or as many as go into the tasks."""
    if tasks > classes:
        raise bad_value("stream.tasks", tasks, f"1 to {classes}, the number of classes")
    most = (classes + (tasks - 1) * overlap) // tasks
    size = per_task or most
    if overlap >= size and tasks > 1:
        raise bad_value("stream.overlap", overlap, f"0 to {size - 1} ({size} classes in a task)")
    if size > most:
        allowed = f"1 to {most} ({classes} classes, {tasks} tasks, overlap {overlap})"
        raise bad_value("stream.classes_per_task", size, allowed)
    return size
