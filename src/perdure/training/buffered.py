"""Buffered aggregation, simulated: a round closes after a number of uploads, others come later.

Clients that are free begin with the model as it is; each takes a time that is drawn from the run's
seed. The first `buffer_size` uploads to arrive close the round. The last round of a task waits for
all, so that no upload is of parameters that the next task does not train.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from perdure.contract.context import Context
from perdure.contract.exchanges import Train
from perdure.contract.upload_collector import StackedUploads, UploadCollector
from perdure.contract.uploads import Sum
from perdure.core.trees import Tensors
from perdure.training.exchanging import keep
from perdure.training.experiment import Experiment
from perdure.training.rounds import After, local_training, silent
from perdure.training.sampling import sample
from perdure.training.state import PendingUpload, RunState


def gather_buffered(
    experiment: Experiment, state: RunState, context: Context, during: After | None
) -> tuple[list[int], UploadCollector]:
    """Let free clients begin and wait for the first uploads; return who was sampled, and these."""
    train = experiment.exchanges(state).train
    sampled = sample(experiment.config, experiment.task(state.task), context)
    busy = {upload.client for upload in state.pending}
    _begin(experiment, state, context, [client for client in sampled if client not in busy])
    arrived = _wait(state, train, last=context.round == context.rounds - 1)
    collector = experiment.privacy.collector(context, sampled, state.ledger)
    staleness = {upload.client: context.round - upload.started for upload in arrived}
    for upload in sorted(arrived, key=lambda upload: upload.client):
        collector.add(_discounted(upload.uploads, train.staleness_weight(staleness[upload.client])))
    collector.close()
    keep(experiment, {u.client: (u.state, u.private) for u in arrived}, collector)
    collector.collected.staleness = {c: staleness[c] for c in collector.collected.clients}
    state.counts.missing += silent(collector)
    return [upload.client for upload in arrived], collector


def _begin(experiment: Experiment, state: RunState, context: Context, clients: list[int]) -> None:
    """Train the clients; what they will send is pending until its time comes."""
    kept: dict[int, tuple[Any, Tensors]] = {}

    def store(client: int, new: Any, private: Tensors) -> None:
        kept[client] = (new, private)

    for uploads in local_training(experiment, state, context, clients, clients, store):
        for row, client in enumerate(uploads.clients):
            new, private = kept.get(client, (None, {}))
            arrives = state.clock + _delay(context, client)
            one = _row(uploads, row)
            state.pending.append(PendingUpload(arrives, context.round, one, new, private))


def _delay(context: Context, client: int) -> float:
    """Return the time that a client takes, exponentially distributed with mean 1."""
    rng = context.rng.numpy_generator("delay", context.task, context.round, client)
    return float(rng.exponential())


def _wait(state: RunState, train: Train, last: bool) -> list[PendingUpload]:
    """Return the uploads that close the round, and advance the clock to the last of them."""
    state.pending.sort(key=lambda upload: (upload.arrives, upload.client))
    count = len(state.pending) if last else train.buffer_size
    arrived, state.pending = state.pending[:count], state.pending[count:]
    state.clock = arrived[-1].arrives if arrived else state.clock
    return arrived


def _row(uploads: StackedUploads, row: int) -> StackedUploads:
    fields = {
        name: replace(part, value={key: v[row : row + 1] for key, v in part.value.items()})
        for name, part in uploads.fields.items()
    }
    return StackedUploads((uploads.clients[row],), (uploads.weights[row],), fields)


def _discounted(uploads: StackedUploads, factor: float) -> StackedUploads:
    """Return an upload with all its weights times a factor."""
    fields = {
        name: replace(part, weight=part.weight * factor)
        if isinstance(part, Sum) and part.weight is not None
        else part
        for name, part in uploads.fields.items()
    }
    weights = tuple(weight * factor for weight in uploads.weights)
    return StackedUploads(uploads.clients, weights, fields)
