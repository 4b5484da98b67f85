"""Aggregation that survives one client's upload: the client is found and left out.

Readers check names, types and shapes of uploads. What is left is known to the method alone, whose
functions raise or return values that are not finite. In a federation the uploads of a round are
kept until it is aggregated, so that the clients with which it fails can be found by trying.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from perdure.contract.context import Context, Server
from perdure.contract.upload_collector import FailedUpload, UploadCollector
from perdure.contract.uploads import CollectedUploads
from perdure.core.errors import RunError
from perdure.core.received import one_line
from perdure.training.state import RunState

log = logging.getLogger(__name__)
Aggregate = Callable[[CollectedUploads], Server]
"""Returns the server after an exchange, given its uploads."""


def aggregate_usable(
    state: RunState, collector: UploadCollector, context: Context, aggregate: Aggregate
) -> Server:
    """Return the server after an exchange; clients whose upload makes that fail are left out.

    Args:
        state: The state of the run, in which clients that are left out are recorded.
        collector: The uploads. If it keeps none, all errors are raised as they are.
        context: The exchange.
        aggregate: Aggregates uploads, or raises.

    Raises:
        RunError: The uploads cannot be aggregated, no matter which clients are left out.
    """
    try:
        return aggregate(collector.collected)
    except Exception as error:  # a method may raise anything
        if not collector.keeps_uploads:
            raise
        return _without_culprits(state, collector, context, aggregate, error)


def _without_culprits(
    state: RunState,
    collector: UploadCollector,
    context: Context,
    aggregate: Aggregate,
    error: Exception,
) -> Server:
    warnings = list(state.counters.warnings)
    reason = one_line(f"{type(error).__name__}: {error}")
    for left_out in _suspects(collector, aggregate):
        uploads = _without(collector, left_out)
        server = _try(aggregate, uploads)
        if server is not None:
            state.counters.warnings[:] = warnings  # of trials
            collector.collected = uploads
            for client in left_out:
                _leave_out(state, collector, context, client, reason)
            return server
    where = f"task {context.task + 1} round {context.round + 1}"
    text = f"{where}: the uploads cannot be aggregated ({reason})"
    raise RunError(f"{text}; the run stops at its last checkpoint") from error


def _suspects(collector: UploadCollector, aggregate: Aggregate) -> Iterator[list[int]]:
    """Yield the clients that fail alone, then every client: sets that may be left out."""
    clients = collector.collected.clients
    alone = [c for c in clients if _try(aggregate, collector.only({c})) is None]
    if 0 < len(alone) < len(clients):
        yield alone
    if len(clients) > 1:
        yield from ([client] for client in clients)


def _without(collector: UploadCollector, left_out: list[int]) -> CollectedUploads:
    clients = collector.collected.clients
    uploads = collector.only(set(clients) - set(left_out))
    fraction = collector.collected.upload_fraction
    uploads.upload_fraction = fraction * len(uploads.clients) / len(clients)
    return uploads


def _try(aggregate: Aggregate, uploads: CollectedUploads) -> Server | None:
    try:
        return aggregate(uploads)
    except Exception:  # a method may raise anything
        return None


def _leave_out(
    state: RunState, collector: UploadCollector, context: Context, client: int, reason: str
) -> None:
    failure = FailedUpload(client, f"the upload cannot be aggregated ({reason})", answered=True)
    collector.failures.append(failure)
    record_failure(state, context, failure)


def record_failure(state: RunState, context: Context, failure: FailedUpload) -> None:
    """Log and count one client that is left out of an exchange."""
    where = f"task {context.task + 1} round {context.round + 1}"
    log.warning("%s: client %d is left out: %s", where, failure.client, failure.reason)
    at = {"task": context.task, "round": context.round}
    state.counters.failures.append({**at, "client": failure.client, "reason": failure.reason})
