"""One training round: sample clients, broadcast, train locally, collect uploads, aggregate."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from perdure.contract.checks import check_tensors, refuse
from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Train
from perdure.contract.uploads import (
    Change,
    CollectedUploads,
    FailedUpload,
    Losses,
    MaskedUpload,
    StackedUploads,
    Sum,
)
from perdure.core.event_log import Event
from perdure.core.trees import Tensors, add, scaled
from perdure.data.images import make_augmentation
from perdure.training.collector import NewClientStates, UploadCollector, with_cap
from perdure.training.events import EventCallback, check_change, clients_event, round_event
from perdure.training.exchange import (
    aggregate_usable,
    as_checkpointed,
    broadcast,
    open_collector,
    record_failures,
    store_client_states,
)
from perdure.training.experiment import Experiment
from perdure.training.local_training import LocalTraining, SaveClient
from perdure.training.sampling import (
    check_quorum,
    count_participation,
    remove_dropouts,
    sample_clients,
)
from perdure.training.state import PendingUpload, RunState

# ------------------------------------------------------------------------------------------------
# One training round: sample clients, broadcast, train locally, collect uploads, aggregate.
# ------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)


def train_round(
    experiment: Experiment, state: RunState, during: EventCallback | None = None
) -> Event:
    """Run one round of the training exchange.

    The round is attempted again while too few clients are left for secure aggregation.
    """
    context = experiment.context(state)
    if experiment.exchanges(state).train.buffer_size is not None:
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
    """
    config, task = experiment.config_at(state.task), experiment.task(state.task)
    sums = experiment.privacy.sums
    started = None if sums is None else sums.started(context)
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
    """Train clients and collect their uploads."""
    config = experiment.config_at(state.task)
    clients = remove_dropouts(config, sampled, context)
    rule = config.train.aggregation
    collector.rule = None if rule.is_sum else rule

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
    """Broadcast the model and return what all clients of the round share."""
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
    """Yield the uploads of local training."""
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


# ------------------------------------------------------------------------------------------------
# Buffered aggregation, simulated: a round closes after `Train.buffer_size` uploads.
#
# Sampled clients that are not busy start with the current model. Each takes a random time, which is
# derived from the run's seed. The first `buffer_size` uploads to arrive close the round; later ones
# count in a later round. The last round of a task waits for all of them, so that no upload is about
# parameters that the next task does not train.
# ------------------------------------------------------------------------------------------------


def collect_buffered_uploads(
    experiment: Experiment, state: RunState, context: Context, during: EventCallback | None
) -> tuple[list[int], UploadCollector]:
    """Train the sampled clients that are not busy and collect the uploads that close the round."""
    train = experiment.exchanges(state).train
    sampled = sample_clients(experiment.config_at(state.task), experiment.task(state.task), context)
    busy = {upload.client for upload in state.pending_uploads}
    losses: Losses = {}
    _start_clients(experiment, state, context, [c for c in sampled if c not in busy], losses)
    arrived = _wait(state, train, last=context.round == context.rounds - 1)
    collector = UploadCollector(ledger=state.ledger)
    collector.losses = losses
    staleness = {upload.client: context.round - upload.start_round for upload in arrived}
    for upload in sorted(arrived, key=lambda upload: upload.client):
        factor = train.staleness_weight(staleness[upload.client])
        collector.add(_with_scaled_weights(upload.uploads, factor))
    collector.close()
    collector.new_states = {u.client: (u.state, u.private) for u in arrived}
    store_client_states(experiment, collector)
    collector.collected.staleness = {c: staleness[c] for c in collector.collected.clients}
    state.counters.missing += count_unanswered(collector)
    return [upload.client for upload in arrived], collector


def _start_clients(
    experiment: Experiment, state: RunState, context: Context, clients: list[int], losses: Losses
) -> None:
    """Train the clients and add their uploads to the pending ones."""
    new_states: NewClientStates = {}

    def keep(client: int, new_state: Any, private: Tensors) -> None:
        new_states[client] = (new_state, private)

    training = local_training(experiment, state, context, clients, losses)
    for uploads in train_clients(experiment, state, training, clients, keep):
        assert isinstance(uploads, StackedUploads), "buffered aggregation is simulated"
        for row, client in enumerate(uploads.clients):
            new_state, private = new_states.get(client, (None, {}))
            arrival_time = state.simulated_time + training_time(context, client)
            state.pending_uploads.append(
                PendingUpload(arrival_time, context.round, _row(uploads, row), new_state, private)
            )


def training_time(context: Context, client: int) -> float:
    """Return the simulated time that a client takes, exponentially distributed with mean 1."""
    rng = context.rng.numpy_generator("delay", context.task, context.round, client)
    return float(rng.exponential())


def _wait(state: RunState, train: Train, last: bool) -> list[PendingUpload]:
    """Return the uploads that close the round, and advance the time to the last of them."""
    pending = sorted(state.pending_uploads, key=lambda upload: (upload.arrival_time, upload.client))
    count = len(pending) if last else train.buffer_size
    arrived, state.pending_uploads = pending[:count], pending[count:]
    state.simulated_time = arrived[-1].arrival_time if arrived else state.simulated_time
    return arrived


def _row(uploads: StackedUploads, row: int) -> StackedUploads:
    fields = {
        name: replace(field, value={key: v[row : row + 1] for key, v in field.value.items()})
        for name, field in uploads.fields.items()
    }
    return StackedUploads((uploads.clients[row],), (uploads.weights[row],), fields)


def _with_scaled_weights(uploads: StackedUploads, factor: float) -> StackedUploads:
    fields = {
        name: replace(field, weight=field.weight * factor)
        if isinstance(field, Sum) and field.weight is not None
        else field
        for name, field in uploads.fields.items()
    }
    weights = tuple(weight * factor for weight in uploads.weights)
    return StackedUploads(uploads.clients, weights, fields)
