"""One exchange server -> clients -> server: what is sent, who works, what is taken in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perdure.contract.checks import refuse
from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Broadcast, Exchange, OncePerTask
from perdure.contract.ledger import flat
from perdure.contract.states import from_tree, to_tree
from perdure.contract.upload_collector import FailedUpload, MaskedUpload, UploadCollector, single
from perdure.core.errors import RunError
from perdure.core.trees import Tensors, Tree, as_read
from perdure.training.experiment import Experiment
from perdure.training.sampling import clients_with_data
from perdure.training.state import RunState

log = logging.getLogger(__name__)
Kept = dict[int, tuple[Any, Tensors]]
"""By client: its new state (None: it does not change) and its private parameters."""


def hold(experiment: Experiment, state: RunState, exchange: Exchange, position: int) -> None:
    """Run one exchange other than training, at its position within the task."""
    context = experiment.context(state, exchange=position)
    clients = participants(experiment, exchange, context)
    sent = _sent(experiment, state, exchange, context, clients)
    collector = _collect(experiment, state, exchange, context, clients, sent)
    while collector.abort_reason:
        context = replace(context, attempt=context.attempt + 1)
        collector = _collect(experiment, state, exchange, context, clients, sent)
    close(collector, state, context)
    if exchange.aggregate is not None:
        server = exchange.aggregate(state.server, collector.collected, context)
        state.server = as_saved(experiment, state.server, server, f"exchange {exchange.name!r}")


def participants(experiment: Experiment, exchange: Exchange, context: Context) -> list[int]:
    """Return the clients of an exchange other than training."""
    if exchange.participants == "none":
        return []
    first = context.task if exchange.participants == "all" else 0
    tasks = [experiment.task(number) for number in range(first, context.task + 1)]
    return sorted({client for task in tasks for client in clients_with_data(task)})


def _sent(
    experiment: Experiment,
    state: RunState,
    exchange: Exchange,
    context: Context,
    clients: list[int],
) -> Tree:
    if not exchange.travels:
        return {"params": state.server.params}
    return broadcast(experiment, state, exchange.broadcast, context, clients)


def broadcast(
    experiment: Experiment,
    state: RunState,
    fields: Broadcast | None,
    context: Context,
    clients: list[int],
) -> Tree:
    """Return what the clients of an exchange receive, entered in the ledger."""
    server, ledger, plan = state.server, state.ledger, experiment.plan(state)
    fresh = {name: value for name, value in server.params.items() if name in plan.sent}
    ledger.send("params", fresh, clients, lasting=False)
    frozen = {n: value for n, value in server.params.items() if n not in plan.trainable}
    ledger.send("frozen", frozen, clients, lasting=True)
    ledger.send("buffers", server.buffers, clients, lasting=False)
    sent: Tree = {"params": server.params}
    for name, field in ({} if fields is None else fields(server, context)).items():
        once = isinstance(field, OncePerTask)
        value = sent[name] = field.value if once else field
        if not (once and state.once.get(name) is value):
            _check(name, value)
        if once and state.once.setdefault(name, value) is not value:
            _check_unchanged(name, value, state.once[name])
        ledger.send(name, {name: value}, clients, lasting=once)
    return sent


def _check(name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check(f"{name}/{key}", inner)
    elif not isinstance(value, Tensor):
        refuse(f"broadcast: {name!r}", f"a {type(value).__name__}", "tensors and dicts of them")


def _check_unchanged(name: str, value: Any, before: Any) -> None:
    now, then = (flat({name: each}) for each in (value, before))
    if set(now) != set(then) or not all(_equal(now[key], then[key]) for key in now):
        refuse(
            f"broadcast: {name!r}", "a OncePerTask value that changed within the task",
            "the same value until the task ends; without OncePerTask it may change",
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
) -> UploadCollector:
    collector = experiment.privacy.collector(
        context, clients if exchange.travels else [], state.ledger
    )
    kept: Kept = {}
    work = (experiment.client(number, context, state.server, sent) for number in clients)
    fields = experiment.needs.per_client_fields
    for client, done in experiment.engine.exchange(exchange, fields, work):
        if isinstance(done, FailedUpload | MaskedUpload):
            collector.add(done)
            continue
        if done.fields:
            collector.add(single(client.id, client.weight, done.fields))
        else:
            collector.empty_uploads += 1
        if done.state is not None:
            kept[client.id] = (done.state, {})
        if collector.is_incremental:  # states need not pile up
            keep(experiment, kept, collector)
    collector.close()
    keep(experiment, kept, collector)
    return collector


def keep(experiment: Experiment, kept: Kept, collector: UploadCollector) -> None:
    """Store client states. A client whose upload is not finite keeps its previous state."""
    for client, (state, private) in kept.items():
        if client not in collector.rejected and not collector.abort_reason:
            experiment.keep(client, state, private)
    kept.clear()


def as_saved(experiment: Experiment, before: Server, server: Server, where: str) -> Server:
    """Return a changed server as a checkpoint would bring it back: a resumed run has the same."""
    kind = experiment.method.ServerState
    if not isinstance(server, Server):
        refuse(where, f"a {type(server).__name__}", "a Server")
    if not isinstance(server.state, kind):
        refuse(f"{where}: state", f"a {type(server.state).__name__}", f"a {kind.__name__}")
    state = server.state
    if state is not before.state:
        state = from_tree(kind, as_read(to_tree(state, "server state")), "server state")
    return Server(as_read(server.params), as_read(server.buffers), state)


def close(collector: UploadCollector, state: RunState, context: Context) -> bool:
    """Return whether there is something to aggregate; name the uploads that were left out."""
    at = {"task": context.task, "round": context.round}
    where = f"task {context.task + 1} round {context.round + 1}"
    for failure in collector.failures:
        log.warning("%s: client %d is left out: %s", where, failure.client, failure.reason)
        state.counts.failures.append({**at, "client": failure.client, "reason": failure.reason})
    for client in collector.rejected:
        log.warning("%s: the update of client %d is not finite and was left out", where, client)
        state.counts.rejected.append({**at, "client": client})
    if collector.rejected and not collector.collected.clients:
        raise RunError(
            f"{where}: no client's update is finite; "
            "the run stops at its last checkpoint (a new run with a smaller train.lr may help)"
        )
    if collector.failures and not (collector.collected.clients or collector.empty_uploads):
        raise RunError(
            f"{where}: no client gave an answer that can be "
            "used; the run stops at its last checkpoint"
        )
    return bool(collector.collected.clients)
