"""One training round: sample clients, broadcast, train locally, collect uploads, aggregate."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from perdure.contract.aggregation import make_rule
from perdure.contract.checks import check_tensors, refuse
from perdure.contract.context import Context, Server
from perdure.contract.local_training import LocalTraining, SaveClient
from perdure.contract.upload_collector import (
    FailedUpload,
    Losses,
    MaskedUpload,
    StackedUploads,
    UploadCollector,
)
from perdure.contract.uploads import Change, CollectedUploads
from perdure.core.event_log import Event
from perdure.core.trees import Tensors, add, scaled
from perdure.data.augment import make_augmentation
from perdure.training.culprits import aggregate_usable
from perdure.training.events import EventCallback, clients_event, round_event
from perdure.training.exchange import (
    as_checkpointed,
    broadcast,
    open_collector,
    record_failures,
    store_client_states,
)
from perdure.training.experiment import Experiment
from perdure.training.participation import check_quorum, count_participation
from perdure.training.sampling import remove_dropouts, sample_clients
from perdure.training.state import RunState
from perdure.training.warnings import check_change
from perdure.training.weights import with_cap

log = logging.getLogger(__name__)


def train_round(
    experiment: Experiment, state: RunState, during: EventCallback | None = None
) -> Event:
    """Run one round of the training exchange.

    The round is attempted again while too few clients are left for secure aggregation.

    Args:
        experiment: The experiment.
        state: The state before the round. It is changed to the state after it.
        during: Called as uploads arrive. If None, nothing is called.

    Returns:
        The round's event.
    """
    context = experiment.context(state)
    if experiment.exchanges(state).train.buffer_size is not None:
        from perdure.training.buffered import collect_buffered_uploads

        sampled, collector = collect_buffered_uploads(experiment, state, context, during)
    else:
        context, sampled, collector = collect_with_attempts(experiment, state, context, during)
    record_failures(experiment, state, collector, context)
    check_quorum(experiment, context, sampled, collector)
    if collector.collected.clients:
        server = aggregate_usable(
            state, collector, context,
            lambda uploads: aggregate(experiment, state, uploads, context),
        )  # fmt: skip
        check_quorum(experiment, context, sampled, collector)  # of the clients that are left
        state.server = server
    count_participation(experiment, state, sampled, collector)
    state.counters.add_round(context, collector)
    state.round += 1
    return round_event(experiment, state, context, sampled, collector)


def collect_with_attempts(
    experiment: Experiment, state: RunState, context: Context, during: EventCallback | None
) -> tuple[Context, list[int], UploadCollector]:
    """Sample and train clients, again while a secure sum cannot be opened.

    A client takes part in one sum of a round alone, since the difference of two sums could be one
    client's upload. So another attempt samples among the clients that have not uploaded. Where
    these are too few, it repeats the same sum and asks only the clients that are missing in it.

    If an earlier process died in this round, the sum of its last attempt comes first.

    Args:
        experiment: The experiment.
        state: The state of the run. Its ledger and counters are updated.
        context: The context of the round's first attempt.
        during: Called as uploads arrive. If None, nothing is called.

    Returns:
        The context of the last attempt, the clients of its sum, and their uploads.
    """
    config, task = experiment.config_at(state.task), experiment.task(state.task)
    started = experiment.privacy.started_sum(context)
    if started is None:
        sampled, uploaded = sample_clients(config, task, context), set[int]()
    else:
        context = replace(context, attempt=started.request.session.attempt)
        sampled, uploaded = list(started.sampled), set(started.excluded)
    collector = open_collector(experiment, state, context, sampled, uploaded)
    collect_uploads(experiment, state, context, sampled, collector, during)
    while collector.abort_reason:
        context, uploaded = replace(context, attempt=context.attempt + 1), collector.uploaded
        others = sample_clients(config, task, context, uploaded)
        if len(others) >= len(sampled):
            sampled = asked = others
            collector = open_collector(experiment, state, context, sampled, uploaded)
        else:
            collector = collector.reopen(context)
            asked = [client for client in sampled if client not in uploaded]
        collect_uploads(experiment, state, context, asked, collector, during)
    collector.collected.upload_fraction = len(collector.collected.clients) / max(1, len(sampled))
    return context, sampled, collector


def collect_uploads(
    experiment: Experiment,
    state: RunState,
    context: Context,
    sampled: list[int],
    collector: UploadCollector,
    during: EventCallback | None,
) -> None:
    """Train clients and collect their uploads.

    Args:
        experiment: The experiment.
        state: The state of the run. Its ledger and counters are updated.
        context: The context of the round's current attempt.
        sampled: Indices of the clients, of which some may drop out.
        collector: Collects their uploads and new states.
        during: Called as uploads arrive. If None, nothing is called.
    """
    config = experiment.config_at(state.task)
    clients = remove_dropouts(config, sampled, context)
    collector.rule = make_rule(config.train.aggregation)

    def keep(client: int, new_state: Any, private: Tensors) -> None:
        collector.new_states[client] = (new_state, private)

    training = local_training(experiment, state, context, sampled, collector.losses)
    cap = collector.weight_cap
    for uploads in train_clients(experiment, state, training, clients, keep, cap):
        collector.add(uploads)
        if during is not None:
            during(state, clients_event(context, uploads, len(sampled)))
    if not (clients or collector.uploaded):
        log.warning(
            "task %d round %d: no client uploaded anything; the model is unchanged",
            context.task + 1, context.round + 1,
        )  # fmt: skip
    collector.close()
    store_client_states(experiment, collector)
    state.counters.missing += len(sampled) - len(clients) + count_unanswered(collector)


def local_training(
    experiment: Experiment, state: RunState, context: Context, receivers: list[int], losses: Losses
) -> LocalTraining:
    """Broadcast the model and return what all clients of the round share.

    Args:
        experiment: The experiment.
        state: The state of the run.
        context: The context of the round.
        receivers: Indices of the clients that receive the broadcast.
        losses: Where engines record the training loss of every client.
    """
    train, server = experiment.exchanges(state).train, state.server
    sent = broadcast(experiment, state, train.broadcast, context, receivers)
    return LocalTraining(
        train, context, experiment.config_at(state.task).train, server.params, server.buffers, sent,
        experiment.needs.per_client_fields, losses=losses,
        augmentation=make_augmentation(experiment.config.data),
    )  # fmt: skip


def train_clients(
    experiment: Experiment,
    state: RunState,
    training: LocalTraining,
    clients: list[int],
    keep: SaveClient,
    cap: float = math.inf,
) -> Iterator[StackedUploads | MaskedUpload | FailedUpload]:
    """Yield the uploads of local training.

    Args:
        experiment: The experiment.
        state: The state of the run.
        training: What all clients of the round share.
        clients: Indices of the clients that train and upload.
        keep: Called with every client's new state and private parameters.
        cap: Number of examples beyond which a client's do not count.
    """
    if not clients:
        return iter(())
    context, sent = training.context, training.broadcast
    members = [
        with_cap(experiment.client(client, context, state.server, sent), cap) for client in clients
    ]
    return experiment.engine.train(training, members, keep)


def aggregate(
    experiment: Experiment, state: RunState, uploads: CollectedUploads, context: Context
) -> Server:
    """Return the server after a round: combine, scale by the server's step size, adjust, apply.

    Args:
        experiment: The experiment.
        state: The state before the round's update. It is not changed.
        uploads: The collected uploads of the round, of at least one client.
        context: The context of the round.

    Raises:
        ContractError: `combine` or `adjust` of the method returned something invalid.
        RunError: The change of the model is not finite.
    """
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
    check_change(experiment, state, change, context)
    params, buffers = add(server.params, change.params), add(server.buffers, change.buffers)
    return as_checkpointed(
        experiment, server, Server(params, buffers, change.state), where="adjust"
    )


def count_unanswered(collector: UploadCollector) -> int:
    """Return the number of clients that never answered."""
    return sum(not failure.answered for failure in collector.failures)
