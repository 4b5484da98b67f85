"""Who takes part in a round, and who of them never reports."""

from __future__ import annotations

import logging
import math

import numpy as np

from perdure.config import ROUNDING, Config
from perdure.contract.context import Context
from perdure.data.streams import Task

log = logging.getLogger(__name__)


def clients_with_data(task: Task) -> list[int]:
    """The clients that hold data of a task."""
    return [int(client) for client in np.flatnonzero(task.partition.sizes)]


def sample(config: Config, task: Task, context: Context) -> list[int]:
    """A uniform sample without replacement of those who hold data, in the order of their index."""
    there = np.flatnonzero(task.partition.sizes)
    rng = context.rng.numpy_generator("sample", *_where(context))
    chosen = rng.choice(there, size=min(config.per_round, len(there)), replace=False)
    return sorted(int(client) for client in chosen)


def reporting(config: Config, sampled: list[int], context: Context) -> list[int]:
    """The sampled clients less the share that never reports.

    A share that is no whole number of clients is one more in as many rounds as make it come out
    right on average: 0.1 of 4 clients is one client in four rounds of ten.
    """
    share = config.clients.dropout * len(sampled)
    if not share:
        return sampled
    rng = context.rng.numpy_generator("dropout-of-clients", *_where(context))
    least, most = math.floor(share + ROUNDING), config.clients.max_dropouts(len(sampled))
    lost = least if least == most else least + int(rng.random() < share - least)
    missing = {int(client) for client in rng.choice(sampled, size=lost, replace=False)}
    if missing:
        log.debug(
            "task %d round %d: no report from %s", context.task, context.round, sorted(missing)
        )
    return [client for client in sampled if client not in missing]


def _where(context: Context) -> tuple[int, ...]:
    """A round that is begun again draws anew."""
    again = (context.attempt,) if context.attempt else ()
    return (context.task, context.round, *again)
