"""The number of clients where the data names them."""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.config import Config, NaturalPartition
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.data.clients import check_clients, config_location, unify_clients
from perdure.data.load import forget_kept, load_and_keep, load_and_keep_domains, load_source
from perdure.data.source import Source
from perdure.data.streams.domains import SourcesStream, listed
from perdure.data.streams.given import GivenStream, first_sources
from perdure.data.streams.stream import Stream


def with_client_count(config: Config) -> Config:
    """Return the config with the number of clients that the data names, if it is left to the data.

    Raises:
        UserError: The data does not name clients, or `clients.per_round` is more than there are.
    """
    if config.clients.is_counted or config.federation is not None:
        return config
    forget_kept()
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
    is_natural = isinstance(config.clients.partition, NaturalPartition)
    if not is_natural or extension.data is None:
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
    """Return the clients that the data names, and their training rows in each task.

    Args:
        stream: The stream.
        tasks: Number of tasks. If None, those that are known before training.

    Returns:
        `names`, and `rows` with a list per client of one number per task; None if the data does not
        name clients.
    """
    if stream.client_names is None or stream.agreed is not None:
        return None
    known = stream.tasks[: tasks or stream.known_tasks]
    sizes = np.zeros((len(stream.client_names), len(known)), np.int64)
    for number, task in enumerate(known):
        sizes[: len(task.partition.sizes), number] = task.partition.sizes
    return {"names": list(stream.client_names), "rows": sizes.tolist()}


def _sources(config: Config) -> list[Source]:
    rng, stream = Rng(config.seed), config.stream
    if isinstance(stream, SourcesStream) and stream.domains:
        return listed(stream.domains, config, rng, load_and_keep)
    if isinstance(stream, GivenStream):
        return first_sources(config, rng)
    location = config_location(config)
    if stream.kind == "domains":
        return load_and_keep_domains(config.data, rng, location)
    return [load_and_keep(config.data, rng, location)]
