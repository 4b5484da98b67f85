"""Streams whose tasks are given: by a list or dict of data sets, or by a function of the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, cast

from pydantic import Discriminator, Field, Tag

from perdure.config import Config, DataConfig, StreamConfig
from perdure.config.section import Item, PositiveInt, Text
from perdure.core.errors import RunError, UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.clients import check_clients, config_location, unify_clients
from perdure.data.examples import Source
from perdure.data.images import unify_shapes
from perdure.data.labels import relabel, sort_names
from perdure.data.load import limit_and_resize
from perdure.data.normalization import normalize_source
from perdure.data.python_objects import fingerprint, reading_of, reported
from perdure.data.rows import RawData, RawRows, rows_source
from perdure.data.source import ObjectKeys
from perdure.data.sources.custom import TaskFunction
from perdure.data.streams.domains import domain_order, normalization_of_first
from perdure.data.streams.stream import AskedTasks, Stream, Task, divide_task
from perdure.data.text import tokenize_if_text


def _count_or_names(value: object) -> str:
    return "<several>" if isinstance(value, list) else "<one>"


Classes = Annotated[
    Annotated[PositiveInt, Tag("<one>")]
    | Annotated[list[Text], Field(min_length=1), Tag("<several>")],
    Discriminator(_count_or_names),
]


class GivenStream(StreamConfig):
    """The tasks as the data gives them: parts of a list or dict, or a function of the task.

    A function is asked for task t when it begins. Classes of one name are one class in all tasks.

    Example: `perdure.run({"stream": {"kind": "given"}}, data=[(x1, y1), (x2, y2)])`
    """

    classes: Classes | None = None
    """All classes that tasks may have: their number (labels from 0), or their names. Default: those
    of all parts; of a function, those of the first task."""
    order: list[Item] | None = None
    """Numbers (from 0) or names of the parts in the order of the tasks. Default: as given."""

    resembles: ClassVar[str] = "split"

    @property
    def needs_classes(self) -> bool:
        """Whether there must be classes: the data may give numbers as well."""
        return False

    def build(self, config: Config, rng: Rng) -> Stream:
        """Return the stream of a config."""
        rows = _rows(config)
        if isinstance(rows, TaskFunction):
            return _Asked(self, config, rows, rng).stream()
        sources = _used(self, _sources(rows, config, rng))
        sources = unify_clients(unify_shapes(tokenize_if_text(sources, config)))
        check_clients(config, sources[0])
        names = self.class_names(sources)
        settings = normalization_of_first(config.data, sources[0])
        tasks = [
            _task(config, number, _with_classes(source, names), settings, rng)
            for number, source in enumerate(sources)
        ]
        return Stream.of("given", tasks, sources[0], names)

    def first_sources(self, config: Config, rng: Rng) -> list[Source]:
        """Return the sources of all parts; of a function, that of the first task."""
        rows = _rows(config)
        if isinstance(rows, TaskFunction):
            first = _numbers(self)[0]
            return [_source(f"task {first + 1}", rows.rows(first), config, rng, first)]
        return _sources(rows, config, rng)

    def class_names(self, sources: Sequence[Source]) -> tuple[str, ...]:
        """Return the names of all classes: those of the config, or else of some sources."""
        if isinstance(self.classes, int):
            return tuple(str(label) for label in range(self.classes))
        if self.classes is not None:
            return tuple(self.classes)
        names = list(dict.fromkeys(name for source in sources for name in source.class_names))
        is_number = all(name.isdecimal() for name in names)
        return tuple(sorted(names, key=int) if is_number else names)


def _rows(config: Config) -> dict[str, RawData] | TaskFunction:
    rows = config.data.rows(config_location(config))
    if rows is None:
        expected = f"permuted, split, domains or pool with data.source {config.data.source!r}"
        raise bad_value("stream.kind", "given", expected)
    return {"task 1": rows} if isinstance(rows, RawData) else rows


def _sources(rows: dict[str, RawData], config: Config, rng: Rng) -> list[Source]:
    return [
        _source(name, part, config, rng, number) for number, (name, part) in enumerate(rows.items())
    ]


def _source(name: str, rows: RawData, config: Config, rng: Rng, number: int) -> Source:
    location = config_location(config, f"data of {name}", number)
    with reported(rows, location):
        named = _with_named_labels(rows)
        source = rows_source(name, named, reading_of(cast(ObjectKeys, config.data), rng, location))
    return limit_and_resize(source, config.data, rng, number)


def _with_named_labels(rows: RawData) -> RawData:
    """Return rows whose labels are strings: a number is the name of its class in all tasks."""
    if rows.class_names is not None or rows.train.y.dtype.kind not in "ui":
        return rows
    train, test = _as_strings(rows.train), rows.test and _as_strings(rows.test)
    return replace(rows, train=train, test=test, class_names=sort_names(train.y))


def _as_strings(part: RawRows) -> RawRows:
    return replace(part, y=part.y.astype(str))


def _used(stream: GivenStream, sources: list[Source]) -> list[Source]:
    names = tuple(source.name for source in sources)
    return [sources[number] for number in domain_order(stream, stream.order, names, "parts")]


def _numbers(stream: GivenStream) -> list[int]:
    """Return the number that a function is asked for in each task."""
    if stream.order is None:
        return list(range(stream.tasks))
    named = next((item for item in stream.order if isinstance(item, str)), None)
    if named is not None or len(stream.order) < stream.tasks:
        expected = f"numbers of {stream.tasks} tasks or more, since a function gives the data"
        raise bad_value("stream.order", stream.order, expected)
    return [int(number) for number in stream.order[: stream.tasks]]


def _with_classes(source: Source, names: tuple[str, ...]) -> Source:
    numbers = {name: number for number, name in enumerate(names)}
    other = next((name for name in source.class_names if name not in numbers), None)
    if other is not None:
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise UserError(
            f"stream.classes: must name all classes, since {source.name} has {other!r} beside "
            f"{shown}"
        )
    return relabel(source, numbers)


def _task(config: Config, number: int, source: Source, settings: DataConfig, rng: Rng) -> Task:
    return divide_task(config, normalize_source(source, settings), number, source.name, rng)


class _Asked:
    """A function that is asked for one task after the other; the first one sets the frame."""

    def __init__(
        self, stream: GivenStream, config: Config, function: TaskFunction, rng: Rng
    ) -> None:
        self.config, self.function, self.rng = config, function, rng
        self.numbers, self.hashes = _numbers(stream), dict[int, str]()
        self.first = unify_clients([self._ask(0)])[0]
        check_clients(config, self.first)
        self.names = stream.class_names([self.first])
        self.settings = normalization_of_first(config.data, self.first)

    def stream(self) -> Stream:
        """Return the stream, of which the first task was made."""
        tasks = AskedTasks(len(self.numbers), self._make)
        stream = Stream.of("given", tasks, self.first, self.names)
        return replace(stream, data_hashes=self.hashes)

    def _ask(self, task: int) -> Source:
        number = self.numbers[task]
        rows = self.function.rows(number)
        self.hashes[task] = fingerprint(rows)
        source = _source(f"task {number + 1}", rows, self.config, self.rng, number)
        return tokenize_if_text([source], self.config, padded=True)[0]

    def _make(self, task: int) -> Task:
        if task == 0:
            return self._task(task, self.first)
        try:
            return self._task(task, self._fitting(self._ask(task)))
        except UserError as error:  # the run has begun, and can be resumed
            raise RunError(str(error)) from error

    def _task(self, task: int, source: Source) -> Task:
        named = _with_classes(source, self.names)
        return _task(self.config, task, named, self.settings, self.rng)

    def _fitting(self, source: Source) -> Source:
        """Return a later source, with the clients of the first; UserError if it does not fit."""
        kinds = [(s.shape, str(s.train.x.dtype)) for s in (self.first, source)]
        if kinds[0] != kinds[1]:
            expected = f"rows of shape {kinds[0][0]} and type {kinds[0][1]} as in the first task"
            raise bad_value(f"data of {source.name}", kinds[1], expected)
        return _with_clients(source, self.first)


def _with_clients(source: Source, first: Source) -> Source:
    """Return a source whose clients have the numbers that they have in the first."""
    if first.client_names is None or source.client_names is None:
        return source
    known = {name: number for number, name in enumerate(first.client_names)}
    new = next((name for name in source.client_names if name not in known), None)
    if new is not None:
        raise bad_value(f"data of {source.name}", new, "of the clients of the first task")
    return unify_clients([first, source])[1]
