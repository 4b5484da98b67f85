"""One exchange between server and clients as an object; a round of training is one, too (`round`).

A Round holds everything that belongs to one exchange: its position, the clients that are asked, and
the collector of their uploads with its rule of aggregation, weight caps and privacy. `attempts` and
`close` are the way of the uploads to the server, and `aggregate` is what the server makes of them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from perdure.contract.context import Client, Server
from perdure.contract.exchanges import Exchange, OncePerTask
from perdure.contract.uploads import (
    ClientResult,
    CollectedUploads,
    FailedUpload,
    Losses,
    MaskedUpload,
    stack_of_one,
)
from perdure.core.errors import RunError, refuse
from perdure.core.received import one_line
from perdure.core.trees import Tensors, Tree, split_tree
from perdure.privacy.mechanism import Place
from perdure.training.collector import UploadCollector, weight_bounds, with_cap
from perdure.training.events import likely_cause, warn_diverging
from perdure.training.experiment import Experiment
from perdure.training.sampling import check_quorum, participants
from perdure.training.state import RunState, check_server

log = logging.getLogger(__name__)


def run_exchange(
    experiment: Experiment, state: RunState, exchange: Exchange, position: int
) -> None:
    """Run one opening or task-end exchange, which updates the server and the client states."""
    round_ = Round(experiment, state, position)
    for clients in round_.attempts():
        members = (round_.client(client) for client in clients)  # may not fit in memory together
        fields = experiment.needs.per_client_fields
        for client, result in experiment.engine.exchange(exchange, fields, members):
            round_.collect_result(client, result)
        round_.close()
    round_.aggregate()


class Round:
    """One opening or task-end exchange; the base class of a round of training."""

    def __init__(self, experiment: Experiment, state: RunState, position: int = 0) -> None:
        self.experiment, self.state = experiment, state
        self.plan = experiment.plan(state)
        self.context = self.plan.at(state.round, position)
        self.exchange = self.plan.exchanges.at(position) if position else None
        """The exchange. If None, it is training."""
        self.sampled: list[int] = []
        """The clients that are asked to take part, those of earlier attempts left out."""
        self.sent: Tree = {}
        """The broadcast: the fields that the server sent, and the global model as `params`."""
        self.losses: Losses = {}
        """Weight and training loss of the clients that trained in this process."""
        self.new_states: dict[int, tuple[Any, Tensors]] = {}
        """By client, until the exchange has succeeded: its new state (None if it does not change)
        and its private parameters."""

    @property
    def where(self) -> str:
        """The task and the round, for a message."""
        return f"task {self.context.task + 1} round {self.context.round + 1}"

    # ---- from the server to the clients

    def attempts(self) -> Iterator[list[int]]:
        """Yield the clients to ask, and again those that are missing in a secure sum."""
        assert self.exchange is not None
        self.sampled = participants(self.experiment, self.exchange, self.context)
        if self.exchange.communicates:
            self.broadcast(self.sampled)
        else:
            self.sent = {"params": self.state.server.params}
        self.open(self.sampled if self.exchange.communicates else [])
        yield self.sampled
        while self.collector.abort_reason:
            self.context = replace(self.context, attempt=self.context.attempt + 1)
            self.collector.reopen(self.context)
            yield [client for client in self.sampled if client not in self.collector.uploaded]

    def open(self, clients: list[int], excluded: Collection[int] = ()) -> None:
        """Start to collect the uploads of these clients, with their largest weights."""
        chain, ledger = self.experiment.privacy, self.state.ledger
        exchange = self.plan.train if self.exchange is None else self.exchange
        place = Place(self.context, len(clients), exchange.clip_norms)
        bounds = None
        if self.plan.bounded:
            bounds = weight_bounds(self.experiment, self.context, clients)
        if chain.sums is None:
            self.collector = UploadCollector(chain, place, ledger)
        else:
            from perdure.training.secure_collector import SecureUploadCollector

            self.collector = SecureUploadCollector(chain, place, clients, ledger, bounds, excluded)
        if bounds is not None:
            self.collector.weight_cap = bounds.cap

    def broadcast(self, receivers: list[int]) -> None:
        """Send the model and the fields of the exchange, and add their bytes to the ledger."""
        server, state, plan = self.state.server, self.state, self.plan
        train = plan.train if self.exchange is None else self.exchange
        params = server.params
        fields: dict[str, tuple[Tree, bool]] = {
            "params": ({n: v for n, v in params.items() if n in plan.sent}, False),
            "frozen": ({n: v for n, v in params.items() if n not in plan.trainable}, True),
            "buffers": (server.buffers, False),
        }
        self.sent = {"params": params}
        named = {} if train.broadcast is None else train.broadcast(server, self.context)
        for name, value in named.items():
            once = isinstance(value, OncePerTask)
            value = value.value if isinstance(value, OncePerTask) else value
            if not once or state.sent_once.get(name) is not value:
                _check_broadcast(name, value)
            if once and state.sent_once.setdefault(name, value) is not value:
                _check_unchanged(name, value, state.sent_once[name])
            fields[name], self.sent[name] = ({name: value}, once), value
        state.ledger.count_broadcast(fields, receivers)

    def client(self, index: int) -> Client:
        """Return a client as it receives the broadcast."""
        client = self.experiment.client(index, self.context, self.state.server, self.sent)
        return with_cap(client, self.collector.weight_cap) if self.plan.bounded else client

    # ---- from the clients to the server

    def collect_result(
        self, client: Client, result: ClientResult | MaskedUpload | FailedUpload
    ) -> None:
        """Collect what a client returned beside training."""
        if isinstance(result, FailedUpload | MaskedUpload):
            self.collector.add(result)
            return
        if result.fields:
            self.collector.add(stack_of_one(client.id, client.weight, result.fields))
        else:
            self.collector.empty_uploads += 1
        if result.state is not None:
            self.new_states[client.id] = (result.state, {})
        if self.collector.is_incremental:  # at once, so that they do not fill the memory
            self.store_states()

    def close(self) -> None:
        """Finish an attempt after its last upload, and store the new states if it succeeded."""
        self.collector.close()
        if not self.collector.abort_reason and self.new_states:
            self.store_states()

    def store_states(self) -> None:
        """Store the new client states; a client whose upload is not finite keeps its last one."""
        for client, (state, private) in self.new_states.items():
            if client not in self.collector.rejected:
                self.experiment.store_client_state(client, state, private)
        self.new_states.clear()

    # ---- on the server

    def aggregate(self) -> None:
        """Set the server as it is after the exchange: quorum, culprits, combine, adjust, finite.

        Raises:
            RunError: Clients are missing, or the uploads cannot be aggregated, no matter which
                clients are left out.

        """
        collector, has_quorum = self.collector, self.experiment.config.federation is not None
        if collector.failures or collector.rejected:
            self.record_failures()
        if has_quorum:
            check_quorum(self.experiment, self.context, self.sampled, collector)
        try:
            server = self.server_after(collector.collected)
        except Exception as error:  # a method may raise anything
            if not collector.keeps_uploads:
                raise
            server = self.without_culprits(error)
        if has_quorum:  # of the clients that are left
            check_quorum(self.experiment, self.context, self.sampled, collector)
        self.state.server = server

    def server_after(self, uploads: CollectedUploads) -> Server:
        """Return the server after the exchange, the same one if nothing is aggregated."""
        before = self.state.server
        if self.exchange is None or self.exchange.aggregate is None:
            return before
        server = self.exchange.aggregate(before, uploads, self.context)
        where = f"exchange {self.exchange.name!r}"
        return check_server(self.experiment.method, before, server, where)

    def without_culprits(self, error: Exception) -> Server:
        """Return the server after the exchange without the clients whose upload makes it fail.

        Readers check names, types and shapes of uploads. What is left is known to the method alone,
        whose functions raise or return values that are not finite. In a federation the uploads are
        kept until they are aggregated, so that the clients can be found by trying: those that fail
        alone, and else every single one.
        """
        collector, warnings = self.collector, list(self.state.counters.warnings)
        clients, reason = collector.collected.clients, one_line(f"{type(error).__name__}: {error}")
        alone = [client for client in clients if self._try(collector.only({client})) is None]
        suspects = [alone] if 0 < len(alone) < len(clients) else []
        suspects += [[client] for client in clients] if len(clients) > 1 else []
        for left_out in suspects:
            uploads = collector.only(set(clients) - set(left_out))
            fraction = collector.collected.upload_fraction
            uploads.upload_fraction = fraction * len(uploads.clients) / len(clients)
            server = self._try(uploads)
            if server is None:
                continue
            self.state.counters.warnings[:] = warnings  # without those of trials
            collector.collected = uploads
            for client in left_out:
                sentence = f"the upload cannot be aggregated ({reason})"
                failure = FailedUpload(client, sentence, answered=True)
                collector.failures.append(failure)
                self._record_failure(failure)
            return server
        raise RunError(
            f"{self.where}: the uploads cannot be aggregated ({reason}); the run stops at its last "
            "checkpoint"
        ) from error

    def _try(self, uploads: CollectedUploads) -> Server | None:
        try:
            return self.server_after(uploads)
        except Exception:  # a method may raise anything
            return None

    def record_failures(self) -> None:
        """Log and count the uploads that are left out.

        Raises:
            RunError: Clients worked, but none of their uploads can be used.

        """
        collector, context, where = self.collector, self.context, self.where
        for failure in collector.failures:
            self._record_failure(failure)
        for client in collector.rejected:
            log.warning("%s: the update of client %d is not finite and is left out", where, client)
            at = {"task": context.task, "round": context.round}
            self.state.counters.rejected.append({**at, "client": client})
        if collector.rejected and not collector.collected.clients:
            cause = likely_cause(self.experiment, self.state, context)
            raise RunError(
                f"{where}: no client's update is finite; {cause}; the run stops at its last "
                "checkpoint"
            )
        if collector.rejected:
            symptom = "updates of some clients are not finite"
            warn_diverging(self.experiment, self.state, context, symptom)
        if collector.failures and not (collector.collected.clients or collector.empty_uploads):
            reasons = "; ".join(f"client {f.client}: {f.reason}" for f in collector.failures)
            raise RunError(
                f"{where}: no client sent a valid upload ({reasons}); the run stops at its last "
                "checkpoint"
            )

    def _record_failure(self, failure: FailedUpload) -> None:
        log.warning("%s: client %d is left out: %s", self.where, failure.client, failure.reason)
        at = {"task": self.context.task, "round": self.context.round}
        self.state.counters.failures.append(
            {**at, "client": failure.client, "reason": failure.reason}
        )


def _check_broadcast(name: str, value: Any) -> None:
    """Refuse a field of a broadcast that holds anything but tensors."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_broadcast(f"{name}/{key}", inner)
    elif not isinstance(value, Tensor):
        refuse(f"broadcast: {name!r}", f"a {type(value).__name__}", "tensors and dicts of them")


def _check_unchanged(name: str, value: Any, before: Any) -> None:
    """Refuse a OncePerTask field whose value is another one than earlier in the task."""
    now, then = (split_tree({name: tree})[1] for tree in (value, before))
    same = set(now) == set(then) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        for a, b in ((now[key], then[key]) for key in now)
    )
    if not same:
        refuse(
            f"broadcast: {name!r}", "a OncePerTask value that changed within the task",
            "the same value until the task ends (a value without OncePerTask may change)",
        )  # fmt: skip
