"""Domain streams: every task a source of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perdure.config import Config, DataConfig, DomainConfig, StreamConfig
from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.inputs import normalization_constants
from perdure.data.load import load_domains, load_source
from perdure.data.partition_kinds import make_partition
from perdure.data.resize import resize_source, unify_shapes
from perdure.data.source import ConfigLocation, Source
from perdure.data.streams.stream import Stream, Task, normalize_source, presence, unique_labels
from perdure.data.tokenization import tokenize_if_text


def domain_stream(config: Config, rng: Rng) -> Stream:
    """The listed sources, or the domains inside data, one a task, brought to one shape."""
    said = config.stream.domains
    sources = listed(config, rng) if said else load_domains(config.data, rng)
    order = domain_order(config.stream, len(sources))
    used = unify_shapes(tokenize_if_text([sources[d] for d in order], config))
    usual = _of_the_first(config.data, used[0])
    offsets, names = label_space(used, config.stream.labels)
    tasks = [_task(config, t, source, usual, offsets[t], rng) for t, source in enumerate(used)]
    return Stream("domains", tasks, names, used[0].shape)


def listed(config: Config, rng: Rng) -> list[Source]:
    """The sources of stream.domains, each with the name that the config gives it."""
    sources = []
    for number, domain in enumerate(config.stream.domains or []):
        location = ConfigLocation(f"stream.domains.{number}", number)
        source = load_source(domain, rng, location)
        sources.append(resize_source(source, config.data.size, config.data.channels))
    return [
        Source(domain.name or _default_name(domain), s.train, s.test, s.classes, s.texts)
        for domain, s in zip(config.stream.domains or [], sources, strict=True)
    ]


def _default_name(domain: DomainConfig) -> str:
    return Path(domain.path).stem if domain.path else domain.source


def _of_the_first(data: DataConfig, first: Source) -> DataConfig:
    """One normalisation for all domains: who predicts without a task label has no other.

    Where the config gives none it is that of the first domain's training data, the only one that
    is there when the stream begins.
    """
    mean, std = normalization_constants(first.train.x, data, "data")
    return DataConfig(mean=mean, std=std, normalize=data.normalize)


def domain_order(stream: StreamConfig, count: int) -> list[int]:
    """Which domains are used, in which order.

    The default number of tasks means all domains where there are fewer: it was made for other
    streams, and a config that was written out with its defaults must still be read.
    """
    order = list(range(count)) if stream.order is None else stream.order
    if len(set(order)) != len(order) or not set(order) <= set(range(count)) or not order:
        raise bad_value("stream.order", order, f"different numbers from 0 to {count - 1}")
    default = type(stream).model_fields["tasks"].default
    if stream.tasks > len(order) and stream.tasks != default:
        raise bad_value("stream.tasks", stream.tasks, f"1 to {len(order)}, the number of domains")
    return order[: stream.tasks]


def label_space(sources: list[Source], labels: str) -> tuple[list[int], tuple[str, ...]]:
    """Where each domain's labels begin, and the names of all classes."""
    if labels == "separate":
        ends = np.cumsum([len(source.classes) for source in sources]).tolist()
        names = [f"{source.name}/{name}" for source in sources for name in source.classes]
        return [0, *ends[:-1]], tuple(names)
    if len({len(source.classes) for source in sources}) > 1:
        said = ", ".join(f"{source.name} {len(source.classes)}" for source in sources)
        raise UserError(
            f"stream.labels: got 'shared' for domains that differ in classes ({said}),"
            " allowed: domains with the same number of classes, or labels: separate"
        )
    return [0] * len(sources), sources[0].classes


def _task(
    config: Config, number: int, source: Source, settings: DataConfig, offset: int, rng: Rng
) -> Task:
    material = normalize_source(source, settings, "data", offset)
    labels = material.labels()
    shares = make_partition(
        labels,
        np.arange(len(labels)),
        config.clients.count,
        config.clients.partition,
        rng.numpy_generator("partition", number),
        presence(config, number, rng),
    )
    return material.task(number, source.name, unique_labels(labels), shares)
