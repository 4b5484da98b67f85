"""The number of clients where the data names them."""

from __future__ import annotations

from typing import Any

import numpy as np

from perdure.config import Config
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.data.clients import check_clients, config_location, unify_clients
from perdure.data.load import load_domains, load_source
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
    source = unify_clients(_sources(config))[0]
    check_clients(config, source)
    count = len(source.client_names or ())
    per_round = config.clients.per_round
    if per_round is not None and per_round > count:
        expected = f"1 to {count}, the number of clients in the data"
        raise bad_value("clients.per_round", per_round, expected)
    clients = config.clients.model_copy(update={"count": count})
    return config.model_copy(update={"clients": clients})


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
    sizes = np.stack([task.partition.sizes for task in known], 1)
    return {"names": list(stream.client_names), "rows": sizes.tolist()}


def _sources(config: Config) -> list[Source]:
    rng, stream = Rng(config.seed), config.stream
    if isinstance(stream, SourcesStream) and stream.domains:
        return listed(stream.domains, config, rng)
    if isinstance(stream, GivenStream):
        return first_sources(config, rng)
    location = config_location(config)
    if stream.kind == "domains":
        return load_domains(config.data, rng, location)
    return [load_source(config.data, rng, location)]
