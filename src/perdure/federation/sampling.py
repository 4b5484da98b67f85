"""Who takes part in a round, and who of them never reports."""

from __future__ import annotations

import logging

import numpy as np

from perdure.config import Config
from perdure.data.streams import Task
from perdure.methods.base import Place

log = logging.getLogger(__name__)


def holders(task: Task) -> list[int]:
    """The clients that hold data of a task."""
    return [int(client) for client in np.flatnonzero(task.shares.sizes)]


def sample(config: Config, task: Task, place: Place) -> list[int]:
    """A uniform sample without replacement of those who hold data, in the order of their index."""
    there = np.flatnonzero(task.shares.sizes)
    rng = place.draws.numpy("sample", *_where(place))
    chosen = rng.choice(there, size=min(config.per_round, len(there)), replace=False)
    return sorted(int(client) for client in chosen)


def reporting(config: Config, sampled: list[int], place: Place) -> list[int]:
    """The sampled clients less the share that never reports."""
    lost = round(config.clients.dropout * len(sampled))
    if not lost:
        return sampled
    rng = place.draws.numpy("dropout-of-clients", *_where(place))
    missing = {int(client) for client in rng.choice(sampled, size=lost, replace=False)}
    log.debug("task %d round %d: no report from %s", place.task, place.round, sorted(missing))
    return [client for client in sampled if client not in missing]


def _where(place: Place) -> tuple[int, ...]:
    """A round that is begun again draws anew."""
    again = (place.attempt,) if place.attempt else ()
    return (place.task, place.round, *again)
