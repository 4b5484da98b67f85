"""Buffered aggregation, simulated: a round closes after `Train.buffer_size` uploads.

Sampled clients that are not busy start with the current model. Each takes a random time, which is
derived from the run's seed. The first `buffer_size` uploads to arrive close the round; later ones
count in a later round. The last round of a task waits for all of them, so that no upload is about
parameters that the next task does not train.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perdure.contract.context import Context
from perdure.contract.exchanges import Train
from perdure.contract.upload_collector import (
    Losses,
    NewClientStates,
    StackedUploads,
    UploadCollector,
)
from perdure.contract.uploads import Sum
from perdure.core.trees import Tensors
from perdure.training.events import EventCallback
from perdure.training.exchange import store_client_states
from perdure.training.experiment import Experiment
from perdure.training.rounds import count_unanswered, local_training, train_clients
from perdure.training.sampling import sample_clients
from perdure.training.state import PendingUpload, RunState


def collect_buffered_uploads(
    experiment: Experiment, state: RunState, context: Context, during: EventCallback | None
) -> tuple[list[int], UploadCollector]:
    """Train the sampled clients that are not busy and collect the uploads that close the round.

    Args:
        experiment: The experiment.
        state: The state of the run. Its pending uploads, ledger and counters are updated.
        context: The context of the round.
        during: Not called, since uploads arrive in simulated time.

    Returns:
        The clients whose uploads arrived, and the uploads.
    """
    train = experiment.exchanges(state).train
    sampled = sample_clients(experiment.config_at(state.task), experiment.task(state.task), context)
    busy = {upload.client for upload in state.pending_uploads}
    losses: Losses = {}
    _start_clients(experiment, state, context, [c for c in sampled if c not in busy], losses)
    arrived = _wait(state, train, last=context.round == context.rounds - 1)
    collector = experiment.privacy.collector(context, sampled, state.ledger)
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
            arrival_time = state.simulated_time + _training_time(context, client)
            state.pending_uploads.append(
                PendingUpload(arrival_time, context.round, _row(uploads, row), new_state, private)
            )


def _training_time(context: Context, client: int) -> float:
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
