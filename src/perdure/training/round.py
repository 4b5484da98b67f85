"""Rounds of training: sample clients, broadcast, train locally, collect uploads, aggregate."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from perdure.contract.context import Context, Server
from perdure.contract.transforms import check_tensors
from perdure.contract.uploads import (
    Change,
    CollectedUploads,
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    Sum,
)
from perdure.core.errors import refuse
from perdure.core.event_log import Event
from perdure.core.trees import Tensors
from perdure.training.events import (
    EventCallback,
    accuracies_within_task,
    check_change,
    clients_event,
    diagnostics_event,
)
from perdure.training.exchange import Round
from perdure.training.experiment import Experiment
from perdure.training.local_training import LocalTraining
from perdure.training.sampling import count_participation, remove_dropouts, sample_clients
from perdure.training.state import PendingUpload, RunState, check_server

log = logging.getLogger(__name__)


def train_round(
    experiment: Experiment, state: RunState, during: EventCallback | None = None
) -> Event:
    """Run one round of training and return its event."""
    is_buffered = experiment.plan(state).train.buffer_size is not None
    round_ = (BufferedRound if is_buffered else TrainingRound)(experiment, state)
    for clients in round_.attempts():
        if clients:
            training, members = round_.local_training(), [round_.client(c) for c in clients]
            for uploads in experiment.engine.train(training, members, round_.keep_state):
                round_.collect(uploads, during)
        round_.close()
    round_.aggregate()
    return round_.finish()


class TrainingRound(Round):
    """One round of training."""

    def attempts(self) -> Iterator[list[int]]:
        """Yield the clients that train, again while a secure sum cannot be opened.

        A client takes part in one sum of a round alone, since the difference of two sums could be
        one client's upload. So another attempt samples among the clients that have not uploaded.
        Where these are too few, it repeats the same sum and asks only the clients that are missing
        in it. If an earlier process died in this round, the sum of its last attempt comes first.
        """
        config, task = self.plan.config, self.plan.task
        sums = self.experiment.privacy.sums
        started = None if sums is None else sums.started(self.context)
        if started is None:
            self.sampled, excluded = sample_clients(config, task, self.context), set[int]()
        else:
            self.context = replace(self.context, attempt=started.request.session.attempt)
            self.sampled, excluded = list(started.sampled), set(started.excluded)
        self.open(self.sampled, excluded)
        yield self._ask(self.sampled)
        while self.collector.abort_reason:
            self.context = replace(self.context, attempt=self.context.attempt + 1)
            uploaded = self.collector.uploaded
            others = sample_clients(config, task, self.context, uploaded)
            if len(others) >= len(self.sampled):
                self.sampled = others
                self.open(others, uploaded)
                yield self._ask(others)
            else:
                self.collector = self.collector.reopen(self.context)
                yield self._ask([client for client in self.sampled if client not in uploaded])

    def open(self, clients: list[int], excluded: Collection[int] = ()) -> None:
        """Start to collect the uploads of these clients, with the rule of aggregation."""
        super().open(clients, excluded)
        self.collector.rule = self.plan.rule
        self.losses, self.new_states = {}, {}

    def _ask(self, clients: list[int]) -> list[int]:
        """Broadcast to the clients, and return those that do not drop out."""
        self.asked = len(clients)
        self.broadcast(clients)
        clients = remove_dropouts(self.plan.config, clients, self.context)
        self.state.counters.missing += self.asked - len(clients)
        if not (clients or self.collector.uploaded):
            message = "%s: no client uploaded anything; the model is unchanged"
            log.warning(message, self.where)
        return clients

    def local_training(self) -> LocalTraining:
        """Return what all clients of the round share."""
        fields, server = self.experiment.needs.per_client_fields, self.state.server
        return self.plan.local_training(self.context, server, self.sent, fields, self.losses)

    def keep_state(self, client: int, state: Any, private: Tensors) -> None:
        """Keep a client's new state (None if it does not change) until the round has succeeded."""
        self.new_states[client] = (state, private)

    def collect(
        self,
        uploads: StackedUploads | MaskedUpload | FailedUpload,
        during: EventCallback | None = None,
    ) -> None:
        """Collect uploads as they arrive."""
        self.collector.add(uploads)
        if during is not None:
            during(self.state, clients_event(self.context, uploads, self.asked))

    def close(self) -> None:
        """Finish an attempt after its last upload."""
        super().close()
        self.state.counters.missing += sum(not f.answered for f in self.collector.failures)
        uploads = self.collector.collected
        uploads.upload_fraction = len(uploads.client_weights) / max(1, len(self.sampled))

    def server_after(self, uploads: CollectedUploads) -> Server:
        """Return the server after the round: combine, scale by the step size, adjust, apply.

        It is the same one if no client uploaded.

        Raises:
            ContractError: `combine` or `adjust` of the method returned something invalid.
            RunError: The change of the model is not finite.

        """
        server, plan, context = self.state.server, self.plan, self.context
        if not uploads.client_weights:
            return server
        train, lr = plan.train, plan.server_lr
        if train.combine is None:
            update = uploads.mean("update")
        else:
            update = train.combine(server, uploads, context)
            check_tensors("combine", update, plan.sent)
        if lr != 1:
            update = {name: value * lr for name, value in update.items()}
        buffers = uploads.mean("buffers") if uploads.has("buffers") else {}
        change = Change(update, buffers, server.state)
        if train.adjust is not None:
            change = train.adjust(server, change, uploads, context)
            if not isinstance(change, Change):
                refuse("adjust", f"a {type(change).__name__}", "a Change")
            check_tensors("adjust", change.params, plan.sent)
            check_tensors("adjust", change.buffers, {n: v.shape for n, v in server.buffers.items()})
        check_change(self.experiment, self.state, change, context)
        params = {n: server.params[n].add(value) for n, value in change.params.items()}
        statistics = {n: server.buffers[n].add(value) for n, value in change.buffers.items()}
        after = Server(server.params | params, server.buffers | statistics, change.state)
        return check_server(self.experiment.method, server, after, "adjust")

    def finish(self) -> Event:
        """Count the finished round and return its event."""
        state, experiment, collector = self.state, self.experiment, self.collector
        if not experiment.privacy.simulated:
            count_participation(state, self.sampled, collector)
        if self.context.attempt:
            at = {"task": self.context.task, "round": self.context.round}
            succeeded = {**at, "attempt": self.context.attempt}
            state.counters.repeated.append({**succeeded, "clients": sorted(collector.uploaded)})
        state.counters.rounds += 1
        state.counters.client_updates += len(collector.collected.client_weights)
        state.round += 1
        failed = [failure.client for failure in collector.failures]
        clients = collector.collected.client_weights
        event: Event = {
            "event": "round",
            "task": self.context.task,
            "round": self.context.round,
            "lr": self.context.lr,
            "sampled": len(self.sampled),
            "clients": len(clients),
            "rejected": collector.rejected,
            **({"failed": failed} if failed else {}),
            # a federation continues without nodes that fail
            **({} if experiment.privacy.simulated else {"participants": sorted(clients)}),
            "bytes": dict(state.ledger.by_task[-1]),
        }
        # Noisy uploads: the loss would leave the clients without noise. Nobody may have reported it
        # (a federation with secure aggregation); in a simulation of that it is a sum as well.
        if not experiment.privacy.hides_mean_loss:
            losses = [loss for c, loss in self.losses.items() if c not in collector.rejected]
            total = sum(weight for weight, _ in losses)
            mean = sum(weight * loss for weight, loss in losses) / total if total else math.nan
            event |= {"loss": mean} if math.isfinite(mean) else {}
        event |= diagnostics_event(experiment, state, self.context)
        every = experiment.config.runs.evaluate_every
        if every and state.round % every == 0:
            event |= accuracies_within_task(experiment, state, self.context.task)
        return event


class BufferedRound(TrainingRound):
    """A round of buffered aggregation, simulated: it closes after `Train.buffer_size` uploads.

    Sampled clients that are not busy start with the current model. Each takes a random time, which
    is derived from the run's seed. The first `buffer_size` uploads to arrive close the round; later
    ones count in a later round. The last round of a task waits for all of them, so that no upload
    is about parameters that the next task does not train.
    """

    def attempts(self) -> Iterator[list[int]]:
        """Yield the sampled clients that are not busy, once."""
        sampled = sample_clients(self.plan.config, self.plan.task, self.context)
        self.open(sampled)
        busy = {upload.client for upload in self.state.pending_uploads}
        idle = [client for client in sampled if client not in busy]
        self.broadcast(idle)
        yield idle

    def collect(
        self,
        uploads: StackedUploads | MaskedUpload | FailedUpload,
        during: EventCallback | None = None,
    ) -> None:
        """Add uploads to those that will arrive after a time."""
        assert isinstance(uploads, StackedUploads), "buffered aggregation is simulated"
        for row, client in enumerate(uploads.clients):
            new_state, private = self.new_states.pop(client, (None, {}))
            arrival_time = self.state.simulated_time + training_time(self.context, client)
            one = row_of(uploads, row)
            self.state.pending_uploads.append(
                PendingUpload(arrival_time, self.context.round, one, new_state, private)
            )

    def close(self) -> None:
        """Wait for the uploads that close the round, and collect them."""
        state, context, train = self.state, self.context, self.plan.train
        pending = sorted(state.pending_uploads, key=lambda each: (each.arrival_time, each.client))
        is_last = context.round == context.rounds - 1
        count = len(pending) if is_last else train.buffer_size
        arrived, state.pending_uploads = pending[:count], pending[count:]
        state.simulated_time = arrived[-1].arrival_time if arrived else state.simulated_time
        staleness = {upload.client: context.round - upload.start_round for upload in arrived}
        for upload in sorted(arrived, key=lambda upload: upload.client):
            factor = train.staleness_weight(staleness[upload.client])
            self.collector.add(with_scaled_weights(upload.uploads, factor))
        self.new_states = {u.client: (u.state, u.private) for u in arrived}
        super().close()
        self.sampled, uploads = [upload.client for upload in arrived], self.collector.collected
        uploads.staleness = {c: staleness[c] for c in uploads.clients}
        uploads.upload_fraction = 1.0


def training_time(context: Context, client: int) -> float:
    """Return the simulated time that a client takes, exponentially distributed with mean 1."""
    rng = context.rng.numpy_generator("delay", context.task, context.round, client)
    return float(rng.exponential())


def row_of(uploads: StackedUploads, row: int) -> StackedUploads:
    """Return one client's upload, as a stack of one client."""
    fields = {
        name: replace(field, value={key: v[row : row + 1] for key, v in field.value.items()})
        for name, field in uploads.fields.items()
    }
    return StackedUploads((uploads.clients[row],), (uploads.weights[row],), fields)


def with_scaled_weights(uploads: StackedUploads, factor: float) -> StackedUploads:
    """Return uploads whose weights are scaled by a factor."""
    fields = {
        name: replace(field, weight=field.weight * factor)
        if isinstance(field, Sum) and field.weight is not None
        else field
        for name, field in uploads.fields.items()
    }
    weights = tuple(weight * factor for weight in uploads.weights)
    return StackedUploads(uploads.clients, weights, fields)
