"""Clients that the data names: a column or a folder says who holds a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config
from perdure.config.sentences import join_or
from perdure.core.errors import UserError, bad_value
from perdure.data.examples import Array, Examples, Source
from perdure.data.labels import sort_names
from perdure.data.source import ConfigLocation

Names = Sequence[str] | Array
"""Strings."""


def config_location(config: Config, key: str = "data", number: int = 0) -> ConfigLocation:
    """Return the position of a source in a config, with the partition if it is a natural one."""
    partition = config.clients.partition
    natural = partition if partition.is_natural else None
    return ConfigLocation(key, number, natural, config.data.target == "number")


def with_clients(source: Source, train: Names, test: Names | None = None) -> Source:
    """Return the source with the client of every training row, and of test rows if known."""
    names = sort_names(np.array([*train, *([] if test is None else test)]))
    parts = replace(source.train, clients=_numbers(train, names)), source.test
    if test is not None:
        parts = parts[0], replace(source.test, clients=_numbers(test, names))
    return replace(source, train=parts[0], test=parts[1], client_names=names)


def _numbers(clients: Names, names: tuple[str, ...]) -> Tensor:
    numbers = {name: number for number, name in enumerate(names)}
    return torch.tensor([numbers[str(client)] for client in clients], dtype=torch.int64)


def unify_clients(sources: Sequence[Source]) -> list[Source]:
    """Return the sources of one stream with one list of clients, joined by name."""
    if any(source.client_names is None for source in sources):
        return list(sources)
    every = [name for source in sources for name in source.client_names or ()]
    names = sort_names(np.array(every))
    return [_renumbered(source, names) for source in sources]


def append_clients(
    source: Source, known: tuple[str, ...] | None
) -> tuple[Source, tuple[str, ...] | None]:
    """Return a source whose clients are numbered after those that are known, and all names."""
    if known is None or source.client_names is None:
        return source, known
    names = (*known, *(name for name in source.client_names if name not in known))
    return _renumbered(source, names), names


def _renumbered(source: Source, names: tuple[str, ...]) -> Source:
    assert source.client_names is not None
    new = _numbers(source.client_names, names)

    def changed(rows: Examples) -> Examples:
        return rows if rows.clients is None else replace(rows, clients=new[rows.clients])

    return replace(source.map(changed), client_names=names)


def check_clients(config: Config, source: Source) -> None:
    """Refuse a config whose number of clients is not that of the data.

    Raises:
        UserError: The numbers differ, or the data does not name clients.

    """
    partition = config.clients.partition
    if not partition.is_natural:
        return
    if source.client_names is None:
        raise bad_value("clients.partition.kind", partition.kind, _suitable(config))
    count, found = config.clients.count, len(source.client_names)
    if config.clients.is_counted and count != found:
        raise UserError(
            f"clients.count: must be {found} (clients in the data) or null, got {count}"
        )


def _suitable(config: Config) -> str:
    registry = type(config.clients.partition).registry()
    others = [kind for kind in registry.builtin if not registry.find(kind).is_natural]
    source = config.data.source
    return f"{join_or(others)}, since data.source {source!r} does not name clients like this"
