"""One exchange server -> clients -> server: broadcast, client work, uploads, aggregation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perdure.contract.checks import refuse
from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Broadcast, Exchange, OncePerTask
from perdure.contract.states import from_tree, to_tree
from perdure.contract.uploads import CollectedUploads, FailedUpload, MaskedUpload, stack_of_one
from perdure.core.errors import RunError
from perdure.core.received import one_line
from perdure.core.trees import Tree, as_decoded
from perdure.privacy.mechanism import Place
from perdure.training.aggregation import check_finite
from perdure.training.collector import UploadCollector, weight_bounds, with_cap
from perdure.training.events import likely_cause, warn_diverging
from perdure.training.experiment import Experiment
from perdure.training.ledger import flatten_tree
from perdure.training.sampling import check_quorum, participants
from perdure.training.state import RunState

# ------------------------------------------------------------------------------------------------
# Aggregation that survives one client's upload: the client is found and left out.
#
# Readers check names, types and shapes of uploads. What is left is known to the method alone, whose
# functions raise or return values that are not finite. In a federation the uploads of a round are
# kept until it is aggregated, so that the clients with which it fails can be found by trying.
# ------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)
Aggregate = Callable[[CollectedUploads], Server]
"""Returns the server after an exchange, given its uploads."""


def aggregate_usable(
    state: RunState, collector: UploadCollector, context: Context, aggregate: Aggregate
) -> Server:
    """Return the server after an exchange; clients whose upload makes that fail are left out.

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


# ------------------------------------------------------------------------------------------------
# One exchange server -> clients -> server: broadcast, client work, uploads, aggregation.
# ------------------------------------------------------------------------------------------------


def run_exchange(
    experiment: Experiment, state: RunState, exchange: Exchange, position: int
) -> None:
    """Run one opening or task-end exchange, which updates the server and the client states."""
    context = experiment.context(state, exchange=position)
    clients = participants(experiment, exchange, context)
    sent = _broadcast_of(experiment, state, exchange, context, clients)
    uploaders = clients if exchange.communicates else []
    collector = open_collector(experiment, state, context, uploaders)
    _collect(experiment, state, exchange, context, clients, sent, collector)
    while collector.abort_reason:
        context = replace(context, attempt=context.attempt + 1)
        collector.reopen(context)
        missing = [client for client in clients if client not in collector.uploaded]
        _collect(experiment, state, exchange, context, missing, sent, collector)
    record_failures(experiment, state, collector, context)
    check_quorum(experiment, context, clients, collector)
    if exchange.aggregate is not None:
        server = aggregate_usable(
            state, collector, context,
            lambda uploads: _aggregate(experiment, state, exchange, uploads, context),
        )  # fmt: skip
        check_quorum(experiment, context, clients, collector)  # of the clients that are left
        state.server = server


def _aggregate(
    experiment: Experiment,
    state: RunState,
    exchange: Exchange,
    uploads: CollectedUploads,
    context: Context,
) -> Server:
    """Return the server after an opening or task-end exchange."""
    assert exchange.aggregate is not None
    server = exchange.aggregate(state.server, uploads, context)
    return as_checkpointed(experiment, state.server, server, f"exchange {exchange.name!r}")


def open_collector(
    experiment: Experiment,
    state: RunState,
    context: Context,
    clients: list[int],
    excluded: Collection[int] = (),
) -> UploadCollector:
    """Return a collector of the clients' uploads in an exchange, with their largest weights."""
    chain, bounds = experiment.privacy, weight_bounds(experiment, context, clients)
    norms = experiment.exchanges(state).clip_norms(context.exchange)
    place = Place(context, len(clients), norms)
    if chain.sums is None:
        collector = UploadCollector(chain, place, state.ledger)
    else:
        from perdure.training.secure_collector import SecureUploadCollector

        collector = SecureUploadCollector(chain, place, clients, state.ledger, bounds, excluded)
    collector.weight_cap = math.inf if bounds is None else bounds.cap
    return collector


def _broadcast_of(
    experiment: Experiment,
    state: RunState,
    exchange: Exchange,
    context: Context,
    clients: list[int],
) -> Tree:
    if not exchange.communicates:
        return {"params": state.server.params}
    return broadcast(experiment, state, exchange.broadcast, context, clients)


def broadcast(
    experiment: Experiment,
    state: RunState,
    fields: Broadcast | None,
    context: Context,
    clients: list[int],
) -> Tree:
    """Return the broadcast of an exchange and add its bytes to the ledger."""
    server, ledger, plan = state.server, state.ledger, experiment.plan(state)
    trained = {name: value for name, value in server.params.items() if name in plan.sent}
    ledger.count_broadcast("params", trained, clients, once_per_task=False)
    frozen = {n: value for n, value in server.params.items() if n not in plan.trainable}
    ledger.count_broadcast("frozen", frozen, clients, once_per_task=True)
    ledger.count_broadcast("buffers", server.buffers, clients, once_per_task=False)
    sent: Tree = {"params": server.params}
    for name, field in ({} if fields is None else fields(server, context)).items():
        once = isinstance(field, OncePerTask)
        value = sent[name] = field.value if once else field
        if not (once and state.sent_once.get(name) is value):
            _check_tensors(name, value)
        if once and state.sent_once.setdefault(name, value) is not value:
            _check_unchanged(name, value, state.sent_once[name])
        ledger.count_broadcast(name, {name: value}, clients, once_per_task=once)
    return sent


def _check_tensors(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_tensors(f"{name}/{key}", inner)
    elif not isinstance(value, Tensor):
        refuse(f"broadcast: {name!r}", f"a {type(value).__name__}", "tensors and dicts of them")


def _check_unchanged(name: str, value: Any, before: Any) -> None:
    now, then = (flatten_tree({name: tree}) for tree in (value, before))
    if set(now) != set(then) or not all(_equal(now[key], then[key]) for key in now):
        refuse(
            f"broadcast: {name!r}", "a OncePerTask value that changed within the task",
            "the same value until the task ends (a value without OncePerTask may change)",
        )  # fmt: skip


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _collect(
    experiment: Experiment,
    state: RunState,
    exchange: Exchange,
    context: Context,
    clients: list[int],
    sent: Tree,
    collector: UploadCollector,
) -> None:
    """Run the client work of an exchange, collect the uploads and store the new client states."""
    work = (
        with_cap(experiment.client(index, context, state.server, sent), collector.weight_cap)
        for index in clients
    )
    fields = experiment.needs.per_client_fields
    for client, result in experiment.engine.exchange(exchange, fields, work):
        if isinstance(result, FailedUpload | MaskedUpload):
            collector.add(result)
            continue
        if result.fields:
            collector.add(stack_of_one(client.id, client.weight, result.fields))
        else:
            collector.empty_uploads += 1
        if result.state is not None:
            collector.new_states[client.id] = (result.state, {})
        if collector.is_incremental:  # store states at once, so that they do not fill the memory
            store_client_states(experiment, collector)
    collector.close()
    store_client_states(experiment, collector)


def store_client_states(experiment: Experiment, collector: UploadCollector) -> None:
    """Store the new client states of a collector, unless its exchange was aborted.

    A client whose upload is not finite keeps its previous state.
    """
    if collector.abort_reason:
        return
    for client, (state, private) in collector.new_states.items():
        if client not in collector.rejected:
            experiment.store_client_state(client, state, private)
    collector.new_states.clear()


def as_checkpointed(experiment: Experiment, before: Server, server: Server, where: str) -> Server:
    """Return a server as a checkpoint would restore it, so that a resumed run is identical.

    Raises:
        ContractError: `server` is not a Server, or its state is not the method's ServerState.
        RunError: A value of `server` is not finite.

    """
    state_type = experiment.method.ServerState
    if not isinstance(server, Server):
        refuse(where, f"a {type(server).__name__}", "a Server")
    state = server.state
    if not isinstance(state, state_type):
        refuse(f"{where}: state", f"a {type(state).__name__}", f"a {state_type.__name__}")
    check_finite(before, server, where)
    if state is not before.state:
        state = from_tree(state_type, as_decoded(to_tree(state, "server state")), "server state")
    return Server(as_decoded(server.params), as_decoded(server.buffers), state)


def record_failures(
    experiment: Experiment, state: RunState, collector: UploadCollector, context: Context
) -> None:
    """Log and count the uploads that are left out of an exchange.

    Raises:
        RunError: Clients worked, but none of their uploads can be used.

    """
    at = {"task": context.task, "round": context.round}
    where = f"task {context.task + 1} round {context.round + 1}"
    for failure in collector.failures:
        record_failure(state, context, failure)
    for client in collector.rejected:
        log.warning("%s: the update of client %d is not finite and is left out", where, client)
        state.counters.rejected.append({**at, "client": client})
    if collector.rejected and not collector.collected.clients:
        raise RunError(
            f"{where}: no client's update is finite; {likely_cause(experiment, state, context)}; "
            "the run stops at its last checkpoint"
        )
    if collector.rejected:
        warn_diverging(experiment, state, context, "updates of some clients are not finite")
    if collector.failures and not (collector.collected.clients or collector.empty_uploads):
        reasons = "; ".join(f"client {each.client}: {each.reason}" for each in collector.failures)
        raise RunError(
            f"{where}: no client sent a valid upload ({reasons}); the run stops at its last "
            "checkpoint"
        )
