"""Build the stream of a config: its clients, validation rows, and tasks that were added."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config, DomainConfig, Extension
from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.clients import append_clients, check_clients, config_location, unify_clients
from perdure.data.examples import Array, Examples, Source
from perdure.data.images import resize_source
from perdure.data.labels import append_classes, class_labels
from perdure.data.load import load_and_keep, load_source
from perdure.data.normalization import with_normalization
from perdure.data.partition import Partition
from perdure.data.streams.cumulative import make_cumulative
from perdure.data.streams.domains import source_name
from perdure.data.streams.stream import (
    EvalGroup,
    Stream,
    Task,
    divide_task,
    map_tasks,
)
from perdure.data.text import tokenize_to

# ---- The number of clients where the data names them


def with_client_count(config: Config) -> Config:
    """Return the config with the number of clients that the data names, if it is left to the data.

    Raises:
        UserError: The data does not name clients, or `clients.per_round` is more than there are.

    """
    if config.clients.is_counted or config.federation is not None:
        return config
    source = unify_clients(_sources(config))[0]
    check_clients(config, source)
    count = len(source.client_names or ())
    per_round = config.clients.per_round
    if per_round is not None and per_round > count:
        expected = f"1 to {count}, the number of clients in the data"
        raise bad_value("clients.per_round", per_round, expected)
    clients = config.clients.model_copy(update={"count": count})
    return config.model_copy(update={"clients": clients})


def with_added_clients(config: Config) -> Config:
    """Return the config of a run with the clients that join it in the last extension.

    These are clients that its data names and that nobody knew before. The number of clients is then
    a setting of the extension.
    """
    extension = config.extensions[-1]
    if not config.clients.partition.is_natural or extension.data is None:
        return config
    every = [*_sources(config), *_added_sources(config)]
    count = len({name for source in every for name in source.client_names or ()})
    settings = {**extension.settings, "clients.count": count}
    last = extension.model_copy(update={"settings": settings})
    return config.with_extensions(config.stream, [*config.extensions[:-1], last])


def _added_sources(config: Config) -> list[Source]:
    rng, location = Rng(config.seed), config_location(config)
    sections = [section for extension in config.extensions for section in extension.data or ()]
    return [load_source(section, rng, location) for section in sections]


def client_rows(stream: Stream, tasks: int | None = None) -> dict[str, Any] | None:
    """Return the clients that the data names, and their training rows in each task."""
    if stream.client_names is None or stream.agreed is not None:
        return None
    known = stream.tasks[: tasks or stream.known_tasks]
    sizes = np.zeros((len(stream.client_names), len(known)), np.int64)
    for number, task in enumerate(known):
        sizes[: len(task.partition.sizes), number] = task.partition.sizes
    return {"names": list(stream.client_names), "rows": sizes.tolist()}


def _sources(config: Config) -> list[Source]:
    rng = Rng(config.seed)
    sources = config.stream.first_sources(config, rng)
    return sources or [load_and_keep(config.data, rng, config_location(config))]


# ---- Validation rows: training examples that clients hold out, to select settings on
#
# A row is held out in every task that uses it and by every client that holds it, so that nothing of
# it is trained on. Of every class the same fraction is held out.


def hold_out(task: Task, fraction: float, rng: Rng) -> Task:
    """Return the task with a fraction of its training rows held out for validation."""
    if not fraction:
        return task
    labels = class_labels(task.train.y).cpu()
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


# ---- Tasks that were added to a run: more of its stream, or new data after it


def build_with_added(config: Config, rng: Rng) -> Stream:
    """Return the stream of a config with the tasks of its extensions, in their order.

    A task depends on those before it alone, so that a run that was extended equals one that had
    the same extensions in its config from the start.
    """
    stream: Stream = config.stream.build(config, rng)
    if not config.extensions:
        return stream
    builder = _Builder(config, rng, stream, list(stream.tasks[: config.first_tasks]))
    for number, extension in enumerate(config.extensions):
        builder.add(extension, f"extensions.{number}.data")
    return builder.stream()


@dataclass
class _Builder:
    """A stream to which tasks are added, and what is known of it so far."""

    config: Config
    rng: Rng
    first: Stream
    """The stream without new data."""
    tasks: list[Task]

    def __post_init__(self) -> None:
        self.class_names = self.first.class_names
        self.client_names = self.first.client_names
        self.known = [len(self.class_names)] * len(self.tasks)
        self.of_stream = len(self.tasks)  # tasks so far that are not of new data

    def add(self, extension: Extension, key: str) -> None:
        """Add the tasks of an extension."""
        if extension.data is None:
            self._add_of_stream(extension)
        for number, section in enumerate(extension.data or ()):
            self._append(self._task(section, extension, f"{key}.{number}"))

    def _add_of_stream(self, extension: Extension) -> None:
        stream, config = self.first, self.config.at(len(self.tasks))
        if config.clients != self.config.clients:
            stream = self.config.stream.build(config, self.rng)
        start = self.of_stream
        self.of_stream += extension.count
        for task in stream.tasks[start : self.of_stream]:
            self._append(replace(task, index=len(self.tasks)))

    def _append(self, task: Task) -> None:
        self.tasks.append(task)
        self.known.append(len(self.class_names))

    def _task(self, section: DomainConfig, extension: Extension, key: str) -> Task:
        number = len(self.tasks)
        config = self.config.at(number)
        source = load_source(section, self.rng, config_location(config, key, number))
        source = replace(source, name=section.name or source_name(section))
        source = self._like_first(source, key)
        separate = extension.labels == "separate"
        source, self.class_names = append_classes(source, self.class_names, separate, key)
        source, self.client_names = append_clients(source, self.client_names)
        first = self.first.tasks[0]
        source = with_normalization(source, _examples(first).normalization, first.numbers)
        return divide_task(config, source, number, source.name, self.rng)

    def _like_first(self, source: Source, key: str) -> Source:
        """Return the source as the config has it read, in the shape and type of the first task.

        Raises:
            UserError: It has another shape or type, or other columns.

        """
        data, first = self.config.data, self.first
        source = resize_source(source, data.size, data.channels)
        source = tokenize_to(source, self.config, first.shape)
        expected, found = (
            (first.shape, _examples(first.tasks[0]).x.dtype),
            (source.shape, source.train.x.dtype),
        )
        if found != expected:
            hint = "; size and channels of the data resize images" if len(first.shape) == 3 else ""
            raise UserError(
                f"{key}: must be {_shown(*expected)} like the run, got {_shown(*found)}{hint}"
            )
        if source.feature_names != first.feature_names:
            columns = ", ".join(first.feature_names or ("no names",))
            raise UserError(f"{key}.feature_columns: must be those of the run ({columns})")
        return source

    def stream(self) -> Stream:
        """Return the stream with all tasks."""
        return replace(
            self.first, tasks=self.tasks, class_names=self.class_names,
            client_names=self.client_names, known_classes=tuple(self.known),
        )  # fmt: skip


def _examples(task: Task) -> Examples:
    assert isinstance(task.train, Examples)
    return task.train


def _shown(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {shape}"


# ---- Streams of tasks, each divided among the clients
#
# Nobody knows the future: a task does not depend on how many tasks follow it. A stream of three
# tasks is the first three tasks of a longer one, in its examples, normalization and partition.
# Two sizes that the config does not give are found from all tasks: the number of classes per task
# (stream.classes_per_task) and the shape of domains that differ in it (data.size, data.channels).
# The rows of a text model are padded to the longest text of all tasks.

__all__ = ["EvalGroup", "Stream", "Task", "make_stream", "resolve_normalization"]


def make_stream(config: Config, rng: Rng) -> Stream:
    """Return the stream that a config describes, with its data read and divided."""
    stream = build_with_added(resolve_normalization(config), rng)
    fraction = config.data.validation
    if fraction:
        tasks = map_tasks(stream.tasks, lambda task: hold_out(task, fraction, rng))
        stream = replace(stream, tasks=tasks)
    return make_cumulative(stream) if config.stream.cumulative else stream


def resolve_normalization(config: Config) -> Config:
    """Return the config with `data.normalize: false` for a vit, unless the config sets it."""
    data = config.data
    if config.model.scales_inputs or (data.normalize, data.mean, data.std) != (None, None, None):
        return config
    plain = data.model_copy(update={"normalize": False})
    return config.model_copy(update={"data": plain})
