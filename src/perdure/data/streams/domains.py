"""Domain streams: every task has its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializeAsAny

from perdure.config import Config, DataConfig, DomainConfig, StreamConfig
from perdure.config.section import ChosenByKind, Item
from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.clients import check_clients, config_location, unify_clients
from perdure.data.examples import Source
from perdure.data.images import resize_source, unify_shapes
from perdure.data.labels import unify_classes
from perdure.data.load import (
    load_and_keep,
    load_and_keep_domains,
    load_domains,
    load_source,
)
from perdure.data.normalization import normalization_constants, normalize_source, number_scale
from perdure.data.source import ConfigLocation
from perdure.data.streams.stream import Stream, Task, divide_task
from perdure.data.text import tokenize_if_text


class SourcesStream(StreamConfig):
    """Keys of streams that may list several sources."""

    domains: (
        Annotated[
            list[Annotated[SerializeAsAny[DomainConfig], ChosenByKind()]], Field(min_length=1)
        ]
        | None
    ) = None
    """One source per task (split: sources whose classes are joined and divided over the tasks),
    with the keys of `data` and a `name`. Default: the domains inside `data` (PACS, domain folders),
    and for split `data` itself."""
    labels: Literal["shared", "separate"] = "shared"
    """Sources in `domains`: one label space, or one per source (as in 5-Datasets)."""

    in_federation: ClassVar[bool] = True

    def first_sources(self, config: Config, rng: Rng) -> list[Source] | None:
        """Return the listed sources; None if there are none."""
        return listed(self.domains, config, rng, load_and_keep) if self.domains else None


class DomainStream(SourcesStream):
    """Every task has its source: those listed, or the domains inside `data`, in one shape.

    Example: `stream: {kind: domains, domains: [{source: npz, path: a.npz}, {source: digits}]}`
    """

    order: list[Item] | None = None
    """Numbers (from 0) or names of the domains in the order of the tasks. Default: as listed."""

    resembles: ClassVar[str] = "domains"
    unites_shapes: ClassVar[bool] = True

    @property
    def is_open(self) -> bool:
        """Whether the number of tasks is that of the domains."""
        return True

    @property
    def expected_tasks(self) -> int | None:
        """Number of domains that are used; None if only the data can tell how many it has."""
        if self.domains:
            return min(self.tasks, len(self.domains))
        default = type(self).model_fields["tasks"].default  # then every domain is a task
        return None if self.tasks == default else self.tasks

    def first_sources(self, config: Config, rng: Rng) -> list[Source]:
        """Return the listed sources, or the domains inside `data`."""
        sources = super().first_sources(config, rng)
        if sources is not None:
            return sources
        return load_and_keep_domains(config.data, rng, config_location(config))

    def fixed(self, stream: Stream) -> StreamConfig:
        """Return the section with the number of tasks of a stream."""
        return self.model_copy(update={"tasks": len(stream.tasks)})

    def build(self, config: Config, rng: Rng) -> Stream:
        """Return the stream of a config."""
        if self.domains:
            sources = listed(self.domains, config, rng)
        else:
            sources = load_domains(config.data, rng, config_location(config))
        sources = unify_clients(sources)
        check_clients(config, sources[0])
        order = domain_order(self, self.order, tuple(source.name for source in sources))
        used = unify_shapes(tokenize_if_text([sources[d] for d in order], config))
        settings = normalization_of_first(config.data, used[0])
        used = unify_classes(used) if self.labels == "shared" else used
        offsets, names = label_space(used, self.labels)
        tasks = [_task(config, t, s, settings, offsets[t], rng) for t, s in enumerate(used)]
        return Stream.of("domains", tasks, used[0], names)


def listed(
    domains: list[DomainConfig],
    config: Config,
    rng: Rng,
    load: Callable[[DataConfig, Rng, ConfigLocation], Source] = load_source,
) -> list[Source]:
    """Return the sources of `stream.domains`, each with the name that the config gives it."""
    sources = []
    for number, domain in enumerate(domains):
        location = config_location(config, f"stream.domains.{number}", number)
        source = load(domain, rng, location)
        sources.append(resize_source(source, config.data.size, config.data.channels))
    return [
        replace(source, name=domain.name or source_name(domain))
        for domain, source in zip(domains, sources, strict=True)
    ]


def source_name(domain: DomainConfig) -> str:
    """Return the name of a domain whose section gives none: that of its file, or its source."""
    path = None if domain.has_name else getattr(domain, "path", None)
    return domain.source.rpartition(".")[2] if path is None else Path(path).stem


def normalization_of_first(data: DataConfig, first: Source) -> DataConfig:
    """Return `data` with the normalization of all domains.

    Without a task label, prediction cannot know which domain's mean and std to use, so there is one
    of them. If the config gives none it is that of the first domain's training data, the only one
    that exists when the stream begins.
    """
    mean, std = normalization_constants(first.train.x, data, "data")
    numbers = number_scale(first.train.y, data)
    of_targets = {"target_mean": numbers.mean, "target_std": numbers.std} if numbers else {}
    return data.model_copy(update={"mean": mean, "std": std, **of_targets})


def domain_order(
    stream: StreamConfig, given: list[Item] | None, names: tuple[str, ...], what: str = "domains"
) -> list[int]:
    """Return the numbers of the domains that are used, in their order.

    The default number of tasks means all domains if there are fewer: it was made for other streams,
    and a config that was written with its defaults must still be read.
    """
    order = list(range(len(names)))
    if given is not None:
        order = find_items(given, names, order, what)
    default = type(stream).model_fields["tasks"].default
    if stream.tasks > len(order) and stream.tasks != default:
        raise bad_value("stream.tasks", stream.tasks, f"1 to {len(order)}, the number of {what}")
    return order[: stream.tasks]


def find_items(
    items: list[int | str], names: tuple[str, ...], allowed: Sequence[int], what: str
) -> list[int]:
    """Return the numbers of items of `stream.order`, which may be given by name.

    Raises:
        UserError: An item is unknown or given twice, or there is none.

    """
    by_name = {name: number for number, name in enumerate(names) if number in set(allowed)}
    numbers = [by_name.get(item, -1) if isinstance(item, str) else item for item in items]
    if len(set(numbers)) != len(numbers) or not set(numbers) <= set(allowed) or not numbers:
        known = f"different numbers from {allowed[0]} to {allowed[-1]}, or names of {what}"
        raise bad_value("stream.order", items, known)
    return numbers


def label_space(sources: list[Source], labels: str) -> tuple[list[int], tuple[str, ...]]:
    """Where each domain's labels begin, and the names of all classes."""
    if labels == "separate":
        ends = np.cumsum([len(source.class_names) for source in sources]).tolist()
        names = [f"{source.name}/{name}" for source in sources for name in source.class_names]
        return [0, *ends[:-1]], tuple(names)
    if len({len(source.class_names) for source in sources}) > 1:
        class_counts = ", ".join(f"{source.name} {len(source.class_names)}" for source in sources)
        raise UserError(
            "stream.labels: must be 'separate' for domains with different numbers of classes "
            f"({class_counts}), got 'shared'"
        )
    return [0] * len(sources), sources[0].class_names


def _task(
    config: Config, number: int, source: Source, settings: DataConfig, offset: int, rng: Rng
) -> Task:
    normalized = normalize_source(source, settings, "data", offset)
    return divide_task(config, normalized, number, source.name, rng)
