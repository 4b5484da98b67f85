"""Sampling of the clients of a round, of those that drop out, and their participation."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping

import numpy as np

from perdure.config import ROUNDING, Config, FederationConfig
from perdure.contract.context import Context
from perdure.contract.exchanges import Exchange
from perdure.core.errors import RunError
from perdure.data.streams.stream import Task
from perdure.training.collector import UploadCollector
from perdure.training.experiment import Experiment
from perdure.training.state import RunState

log = logging.getLogger(__name__)

# ---- Sampling of the clients of a round, and of those that drop out of it


def clients_with_data(task: Task) -> list[int]:
    """Return the indices of the clients that hold data of a task, sorted."""
    return [int(client) for client in np.flatnonzero(task.partition.sizes)]


def participants(experiment: Experiment, exchange: Exchange, context: Context) -> list[int]:
    """Return the indices of the clients of an opening or task-end exchange, sorted."""
    if exchange.participants == "none":
        return []
    first = context.task if exchange.participants == "all" else 0
    tasks = [experiment.task(index) for index in range(first, context.task + 1)]
    return sorted({client for task in tasks for client in clients_with_data(task)})


def sample_clients(
    config: Config, task: Task, context: Context, excluded: Collection[int] = ()
) -> list[int]:
    """Sample the clients of a round uniformly without replacement."""
    candidates = np.flatnonzero(task.partition.sizes)
    if excluded:
        candidates = np.setdiff1d(candidates, list(excluded))
    attempt = (context.attempt,) if context.attempt else ()  # each has other draws
    rng = context.rng.numpy_generator("sample", context.task, context.round, *attempt)
    size = min(config.clients.per_round or config.clients.count, len(candidates))
    chosen = rng.choice(candidates, size=size, replace=False)
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
    attempt = (context.attempt,) if context.attempt else ()
    rng = context.rng.numpy_generator("dropout-of-clients", context.task, context.round, *attempt)
    least, most = math.floor(expected + ROUNDING), config.clients.max_dropouts(len(sampled))
    count = least if least == most else least + int(rng.random() < expected - least)
    missing = {int(client) for client in rng.choice(sampled, size=count, replace=False)}
    if missing:
        log.debug(
            "task %d round %d: no upload from clients %s",
            context.task + 1, context.round + 1, sorted(missing),
        )  # fmt: skip
    return [client for client in sampled if client not in missing]


# ---- Participation in the rounds of a federation: the quorum, and the counts for the report


def missing_nodes(
    federation: FederationConfig | None, asked: Collection[int], failed: Collection[int]
) -> list[int]:
    """Return the nodes that are missing for the quorum; empty if it is reached."""
    everyone, missing = {*asked, *failed}, sorted(set(failed))
    named = federation.named_nodes if federation is not None else []
    if named:
        return [node for node in missing if node in named]
    quorum = federation.quorum if federation is not None else None
    needed = quorum if isinstance(quorum, int) else 1
    return missing if len(everyone) - len(missing) < min(needed, len(everyone)) else []


def below_quorum(where: str, missing: Collection[int], reasons: Mapping[int, str]) -> RunError:
    """Return the error of a run that stops because nodes are missing, which it names."""
    named = "; ".join(f"node-{n}: {reasons[n].removeprefix(f'node-{n}: ')}" for n in missing)
    return RunError(
        f"{where}: nodes are missing ({named}), and fewer than federation.quorum are left; the run "
        "stops at its last checkpoint, and the server resumes it when it is started again"
    )


def check_quorum(
    experiment: Experiment, context: Context, asked: Collection[int], collector: UploadCollector
) -> None:
    """Stop a federation whose nodes hold the data if too few of them took part in an exchange.

    Raises:
        RunError: Nodes are missing for the quorum, or nobody was asked to train.

    """
    federation = experiment.config.federation
    if federation is None:
        return
    where = f"task {context.task + 1} round {context.round + 1}"
    reasons = _reasons(collector)
    missing = missing_nodes(federation, asked, reasons)
    if missing:
        raise below_quorum(where, missing, reasons)
    if context.exchange == 0 and not collector.collected.clients:
        raise RunError(f"{where}: no node took part; the run stops at its last checkpoint")


def count_participation(state: RunState, sampled: list[int], collector: UploadCollector) -> None:
    """Count for each client of a federation its rounds: sampled, took part, failed."""
    counted, failed = collector.collected.clients, list(_reasons(collector))
    groups = {"sampled": sampled, "counted": counted, "failed": failed}
    for name, clients in groups.items():
        for client in clients:
            counts = state.counters.participation.setdefault(str(client), dict.fromkeys(groups, 0))
            counts[name] += 1


def _reasons(collector: UploadCollector) -> dict[int, str]:
    """Return why clients do not count. A client may fail in one attempt and count in the next."""
    reasons = {client: "its update is not finite" for client in collector.rejected}
    reasons |= {failure.client: failure.reason for failure in collector.failures}
    counted = set(collector.collected.clients)
    return {client: reason for client, reason in reasons.items() if client not in counted}
