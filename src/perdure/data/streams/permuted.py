"""Permuted streams: the same examples in every task, with their values in another order."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from perdure.config import Config, StreamConfig
from perdure.config.section import Item
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.data.examples import Source
from perdure.data.load import load_model_source
from perdure.data.normalization import normalize_source
from perdure.data.partition import Partition, partition_once, present_in_task
from perdure.data.streams.stream import Stream, Task, label_array, make_task, unique_labels


class PermutedStream(StreamConfig):
    """The same examples in every task, with their values (pixels) in another order.

    The first task keeps the order; each later one has a permutation drawn from the seed. Examples
    are divided among the clients once: a client holds the same ones in every task.

    Example: `stream: {kind: permuted, tasks: 5}`
    """

    order: list[Item] | None = None
    """Numbers of the permutations in the order of the tasks; 0 leaves the examples unchanged.
    Default: 0, 1, 2 and so on."""

    resembles: ClassVar[str] = "permuted"
    keeps_pixels: ClassVar[bool] = False

    def build(self, config: Config, rng: Rng) -> Stream:
        """Return the stream of a config."""
        if config.model.reads_text:
            expected = "split, domains or pool with model.kind text, since words have an order"
            raise bad_value("stream.kind", "permuted", expected)
        source = load_model_source(config, rng)
        normalized = normalize_source(source, config.data)
        partition = partition_once(normalized.train, config.clients, rng)
        tasks = [
            _task(normalized, t, number, present_in_task(partition, config, t, rng), rng)
            for t, number in enumerate(self.numbers())
        ]
        return Stream.of("permuted", tasks, source)

    def numbers(self) -> list[int]:
        """Return the number of the permutation of each task."""
        if self.order is None:
            return list(range(self.tasks))
        numbers = [item for item in self.order if isinstance(item, int)]
        default = type(self).model_fields["tasks"].default
        count = min(self.tasks, len(numbers)) if self.tasks == default else self.tasks
        if len(set(numbers)) < len(self.order) or len(numbers) < count:
            expected = f"different numbers of permutations, one for each of {self.tasks} tasks"
            raise bad_value("stream.order", self.order, expected)
        return numbers[:count]


def _task(source: Source, task: int, number: int, partition: Partition, rng: Rng) -> Task:
    order = permutation(number, source.train.rows.shape[1], rng)
    permuted = source.map(lambda part: replace(part, permutation=order))
    name = "as they are" if order is None else f"permutation {number}"
    return make_task(permuted, task, name, unique_labels(label_array(source.train)), partition)


def permutation(number: int, width: int, rng: Rng) -> Tensor | None:
    """Return a permutation of an example's values, int64 [width]; None for number 0."""
    if number == 0:
        return None
    return torch.randperm(width, generator=rng.torch_generator("permutation", number))
