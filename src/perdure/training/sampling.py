"""Sampling of the clients of a round, and of those that drop out of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection

import numpy as np

from perdure.config import ROUNDING, Config
from perdure.contract.context import Context
from perdure.data.streams import Task

log = logging.getLogger(__name__)


def clients_with_data(task: Task) -> list[int]:
    """Return the indices of the clients that hold data of a task, sorted."""
    return [int(client) for client in np.flatnonzero(task.partition.sizes)]


def sample_clients(
    config: Config, task: Task, context: Context, excluded: Collection[int] = ()
) -> list[int]:
    """Sample the clients of a round uniformly without replacement.

    Args:
        config: The config, whose `clients.per_round` is the size of the sample.
        task: The current task; only clients with data of it are sampled.
        context: The round and attempt, from which the sample is derived.
        excluded: Clients that are not sampled.

    Returns:
        The indices of the sampled clients, sorted.
    """
    candidates = np.flatnonzero(task.partition.sizes)
    if excluded:
        candidates = np.setdiff1d(candidates, list(excluded))
    rng = context.rng.numpy_generator("sample", *_round_key(context))
    chosen = rng.choice(candidates, size=min(config.per_round, len(candidates)), replace=False)
    return sorted(int(client) for client in chosen)


def remove_dropouts(config: Config, sampled: list[int], context: Context) -> list[int]:
    """Return the sampled clients without those that never upload in this round.

    Their number is `clients.dropout` times the number of sampled clients on average. If that is
    not an integer, it is rounded up or down at random: 0.1 of 4 clients is one client in four
    rounds out of ten.
    """
    expected = config.clients.dropout * len(sampled)
    if not expected:
        return sampled
    rng = context.rng.numpy_generator("dropout-of-clients", *_round_key(context))
    least, most = math.floor(expected + ROUNDING), config.clients.max_dropouts(len(sampled))
    count = least if least == most else least + int(rng.random() < expected - least)
    missing = {int(client) for client in rng.choice(sampled, size=count, replace=False)}
    if missing:
        log.debug(
            "task %d round %d: no upload from clients %s",
            context.task + 1, context.round + 1, sorted(missing),
        )  # fmt: skip
    return [client for client in sampled if client not in missing]


def _round_key(context: Context) -> tuple[int, ...]:
    """Return the key of a round's draws. Every further attempt has another one."""
    attempt = (context.attempt,) if context.attempt else ()
    return (context.task, context.round, *attempt)
