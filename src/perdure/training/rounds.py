"""One training round: sample, broadcast, train, aggregate."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from perdure.contract.checks import check_tensors, refuse
from perdure.contract.context import Context, Server
from perdure.contract.local_training import Keep, LocalTraining
from perdure.contract.upload_collector import (
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    UploadCollector,
)
from perdure.contract.uploads import Change, CollectedUploads
from perdure.core.trees import Tensors, add, scaled
from perdure.training.exchanging import Kept, as_saved, broadcast, close, keep
from perdure.training.experiment import Experiment
from perdure.training.sampling import reporting, sample
from perdure.training.state import RunState

log = logging.getLogger(__name__)
Event = dict[str, Any]
After = Callable[[RunState, Event], None]


def train_round(experiment: Experiment, state: RunState, during: After | None = None) -> Event:
    """Run one round. `during` is called as uploads arrive."""
    context = experiment.context(state)
    gather = _gather
    if experiment.exchanges(state).train.buffer_size is not None:
        from perdure.training.buffered import gather_buffered as gather
    sampled, collector = gather(experiment, state, context, during)
    while collector.abort_reason:
        context = replace(context, attempt=context.attempt + 1)
        sampled, collector = gather(experiment, state, context, during)
    if context.attempt:
        at = {"task": context.task, "round": context.round, "attempt": context.attempt}
        state.counts.repeated.append(at)
    if close(collector, state, context):
        state.server = aggregate(experiment, state, collector.collected, context)
    state.counts.rounds += 1
    state.counts.client_updates += len(collector.collected.clients)
    state.round += 1
    return _event(experiment, state, context, sampled, collector)


def _gather(
    experiment: Experiment, state: RunState, context: Context, during: After | None
) -> tuple[list[int], UploadCollector]:
    """Sample clients and let them train; return who was sampled, and what they sent."""
    sampled = sample(experiment.config, experiment.task(state.task), context)
    clients = reporting(experiment.config, sampled, context)
    collector = experiment.privacy.collector(context, sampled, state.ledger)
    kept: Kept = {}

    def store(client: int, new: Any, private: Tensors) -> None:
        kept[client] = (new, private)

    for uploads in local_training(experiment, state, context, clients, sampled, store):
        collector.add(uploads)
        if during is not None:
            during(state, _clients_event(context, uploads, len(sampled)))
    if not clients:
        log.warning(
            "task %d round %d: none of the clients reports, the model stays as it is",
            context.task + 1, context.round + 1,
        )  # fmt: skip
    collector.close()
    keep(experiment, kept, collector)
    collector.collected.upload_fraction = len(collector.collected.clients) / len(sampled)
    state.counts.missing += len(sampled) - len(clients) + silent(collector)
    return sampled, collector


def local_training(
    experiment: Experiment,
    state: RunState,
    context: Context,
    clients: list[int],
    receivers: list[int],
    keep: Keep,
) -> Any:
    """Broadcast to the receivers and train those of them that will upload."""
    train, server = experiment.exchanges(state).train, state.server
    sent = broadcast(experiment, state, train.broadcast, context, receivers)
    if not clients:
        return iter(())
    training = LocalTraining(
        train, context, experiment.config.train, server.params, server.buffers, sent,
        experiment.needs.per_client_fields,
    )  # fmt: skip
    members = [experiment.client(client, context, server, sent) for client in clients]
    return experiment.engine.train(training, members, keep)


def aggregate(
    experiment: Experiment, state: RunState, uploads: CollectedUploads, context: Context
) -> Server:
    """Return the server after a round: combine, times the server's step size, adjust, apply."""
    server, plan = state.server, experiment.plan(state)
    train = plan.exchanges.train
    if train.combine is None:
        update = uploads.mean("update")
    else:
        update = train.combine(server, uploads, context)
        check_tensors("combine", update, plan.sent)
    update = scaled(update, plan.server_lr)
    buffers = uploads.mean("buffers") if uploads.has("buffers") else {}
    change = Change(update, buffers, server.state)
    if train.adjust is not None:
        change = train.adjust(server, change, uploads, context)
        if not isinstance(change, Change):
            refuse("adjust", f"a {type(change).__name__}", "a Change")
        check_tensors("adjust", change.params, plan.sent)
        check_tensors("adjust", change.buffers, {n: v.shape for n, v in server.buffers.items()})
    params, buffers = add(server.params, change.params), add(server.buffers, change.buffers)
    return as_saved(experiment, server, Server(params, buffers, change.state), "adjust")


def silent(collector: UploadCollector) -> int:
    """Return the number of clients that were asked and never answered."""
    return sum(not failure.answered for failure in collector.failures)


def diagnostics(experiment: Experiment, server: Server, context: Context) -> Event:
    """Return the method's numbers for an event, if it has any."""
    numbers = experiment.method.diagnostics(server, context)
    return {"method": numbers} if numbers else {}


def _clients_event(
    context: Context, uploads: StackedUploads | MaskedUpload | FailedUpload, sampled: int
) -> Event:
    done = len(uploads.clients) if isinstance(uploads, StackedUploads) else 1
    at = {"task": context.task, "round": context.round, "attempt": context.attempt}
    return {"event": "clients", **at, "done": done, "sampled": sampled}


def _event(
    experiment: Experiment,
    state: RunState,
    context: Context,
    sampled: list[int],
    collector: UploadCollector,
) -> Event:
    event: Event = {
        "event": "round",
        "task": context.task,
        "round": context.round,
        "lr": context.lr,
        "sampled": len(sampled),
        "clients": len(collector.collected.clients),
        "rejected": collector.rejected,
        **(
            {"failed": [failure.client for failure in collector.failures]}
            if collector.failures
            else {}
        ),
        "bytes": dict(state.ledger.by_task[-1]),
        **diagnostics(experiment, state.server, context),
    }
    every = experiment.config.runs.evaluate_every
    if every and state.round % every == 0:
        task = experiment.task(context.task)
        (score,) = experiment.engine.evaluate(experiment.evaluators(state), [task])
        event["accuracy"] = score.accuracy
    return event
