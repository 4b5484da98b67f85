"""Tasks that were added to a run: more of its stream, or new data after it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from perdure.config import Config, DomainConfig, Extension
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.clients import append_clients, config_location
from perdure.data.inputs import Inputs
from perdure.data.load import load_source
from perdure.data.resize import resize_source
from perdure.data.source import Source
from perdure.data.streams.class_names import append_classes
from perdure.data.streams.domains import source_name
from perdure.data.streams.stream import NormalizedSource, Stream, Task, divide_task
from perdure.data.tokenization import tokenize_to


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
        return divide_task(config, self._normalized(source), number, source.name, self.rng)

    def _like_first(self, source: Source, key: str) -> Source:
        """Return the source as the config has it read, in the shape and type of the first task.

        Raises:
            UserError: It has another shape or type, or other columns.
        """
        data, first = self.config.data, self.first
        source = resize_source(source, data.size, data.channels)
        source = tokenize_to(source, self.config, first.shape)
        expected, found = (
            (first.shape, _inputs(first).rows.dtype),
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

    def _normalized(self, source: Source) -> NormalizedSource:
        """Return the source with the normalization of the first task."""
        like = replace(_inputs(self.first), permutation=None, cached_features=None)
        train, test = (
            replace(like, rows=part.x.reshape(len(part), -1))
            for part in (source.train, source.test)
        )
        clients = None if source.train.clients is None else source.train.clients.numpy()
        scale = self.first.tasks[0].numbers
        y, y_test = (
            part.y if scale is None else scale.standardize(part.y)
            for part in (source.train, source.test)
        )
        return NormalizedSource(train, y, test, y_test, clients, source.test.clients, scale)

    def stream(self) -> Stream:
        """Return the stream with all tasks."""
        return replace(
            self.first, tasks=self.tasks, class_names=self.class_names,
            client_names=self.client_names, known_classes=tuple(self.known),
        )  # fmt: skip


def _inputs(stream: Stream) -> Inputs:
    inputs = stream.tasks[0].train
    assert isinstance(inputs, Inputs)
    return inputs


def _shown(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {shape}"
