"""Secure sums in the loop: who holds the keys, and a tally that opens nothing but sums."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from perdure.config.privacy import PrivacyConfig
from perdure.contract.context import Context
from perdure.contract.ledger import Ledger
from perdure.contract.upload_collector import (
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    UploadCollector,
)
from perdure.contract.uploads import Each, Field, Sum, Upload
from perdure.core.errors import RunError
from perdure.core.rng import Rng
from perdure.core.trees import to_device
from perdure.privacy.secagg.client import NOT_FINITE, SecAggClient
from perdure.privacy.secagg.errors import BelowThreshold
from perdure.privacy.secagg.fixed_point import FixedPoint
from perdure.privacy.secagg.keys import KEY_BYTES, TaskKeys
from perdure.privacy.secagg.server import SecAggServer, finish
from perdure.privacy.secagg.transport import SecAggTransport, min_survivors
from perdure.privacy.secagg.wire import Session, SumRequest, encode

log = logging.getLogger(__name__)
OVERHEAD = "secagg"
"""The name in the ledger of everything but the masked values themselves."""


@dataclass
class SimulatedParticipants:
    """All participants in this process. Their keys derive from the run's seed: a simulation."""

    rng: Rng
    _task: int = -1
    _there: dict[int, SecAggClient] = field(default_factory=dict)
    _call: bytes = b""

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """Keys are made when a client first takes part in a task."""
        if task != self._task:
            self._task, self._there = task, {}
        for client in clients:
            if client not in self._there:
                master = self.rng.numpy_generator("secagg", task, client).bytes(KEY_BYTES)
                self._there[client] = SecAggClient(TaskKeys(client, master))
        return {client: self._there[client].keys.public for client in clients}

    def announce(self, call: bytes) -> None:
        """Forget the call before: its sum is done with."""
        self._call = call
        for participant in self._there.values():
            participant.forget()

    def upload(self, client: int, fields: Upload, weight: float) -> bytes:
        """A client's upload as it would travel."""
        return self._there[client].upload(self._call, fields, weight)

    def ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        """Everybody answers."""
        return {client: self._there[client].answer(asked) for client, asked in requests.items()}


class SecureUploadCollector(UploadCollector):
    """A tally that receives masked uploads and opens their sum when it is closed."""

    is_incremental = False

    def __init__(
        self,
        config: PrivacyConfig,
        transport: SecAggTransport,
        context: Context,
        clients: list[int],
        ledger: Ledger,
    ) -> None:
        super().__init__()
        self.before: Callable[[StackedUploads], StackedUploads] = lambda uploads: uploads
        """What clients of this process do to their values before they mask them."""
        self._config, self._crowd, self._context, self._ledger = config, transport, context, ledger
        self._device = torch.device("cpu")
        keys = dict(transport.public_keys(context.task, clients))
        self._aggregator = SecAggServer(make_call(config, context, keys, len(clients)))
        self._announce(encode(self._aggregator.call), list(keys))

    def _announce(self, call: bytes, clients: list[int]) -> None:
        self._crowd.announce(call)
        if not clients:
            return
        fresh = self._ledger.newcomers("secagg keys", clients)
        self._ledger.count("up", OVERHEAD, KEY_BYTES * len(fresh))
        self._ledger.count("down", OVERHEAD, len(call) * len(clients))

    def add(self, uploads: StackedUploads | MaskedUpload | FailedUpload) -> None:
        """Take uploads; those of clients in this process are masked first, one by one."""
        if isinstance(uploads, FailedUpload):
            self.failures.append(uploads)
        elif isinstance(uploads, MaskedUpload):
            self._receive(uploads.client, uploads.data)
        elif isinstance(self._crowd, SimulatedParticipants):
            uploads = self.before(uploads)
            self._device = _device_of(uploads)
            for row, client in enumerate(uploads.clients):
                fields = _one(uploads, row)
                self._receive(client, self._crowd.upload(client, fields, uploads.weights[row]))
        else:
            raise RunError("privacy.secagg: the engine handed over uploads that are not masked")

    def _receive(self, client: int, data: bytes) -> None:
        aggregator = self._aggregator
        aggregator.receive(client, data)
        if client in aggregator.declined:
            self._left_out(client, aggregator.declined[client])
        rows = aggregator.sizes(client)
        for name, size in rows.items():
            self._ledger.count("up", name, size)
            self._ledger.types[name] = Sum.__name__
        self._ledger.count("up", OVERHEAD, len(data) - sum(rows.values()))

    def _left_out(self, client: int, reason: str) -> None:
        """Who found values in its own upload that are not finite is rejected as elsewhere."""
        if reason == NOT_FINITE:
            self.rejected.append(client)
        else:
            self.failures.append(FailedUpload(client, reason, answered=True))

    def close(self) -> None:
        """Open the sum. Below the threshold the round is lost, and the run too at the last try."""
        aggregator = self._aggregator
        heard = aggregator.members or aggregator.declined or aggregator.refused
        if not heard and (self.empty_uploads or not self.failures):
            return  # nobody had anything to send
        try:
            self.collected = finish(aggregator, self._ask)
        except BelowThreshold as error:
            self._note_refused()
            self._lose(str(error))
        else:
            self._note_refused()
        self.collected.sums = to_device(self.collected.sums, self._device)

    def _note_refused(self) -> None:
        refused = self._aggregator.refused.items()
        counted = set(self.collected.clients)
        self.failures += [
            FailedUpload(c, why, answered=True) for c, why in refused if c not in counted
        ]

    def _lose(self, reason: str) -> None:
        context = self._context
        where = f"task {context.task + 1} round {context.round + 1}"
        out = [f"client {client}: not finite" for client in self.rejected]
        out += [f"client {failure.client}: {failure.reason}" for failure in self.failures]
        reason = "; ".join([reason, *out])
        log.warning("%s: no secure sum: %s", where, reason)
        self.abort_reason = reason
        if context.attempt + 1 >= self._config.attempts:
            raise RunError(
                f"{where}: no secure sum in {self._config.attempts} attempts (privacy.attempts), "
                f"the last time because {reason}; the run stops at its last checkpoint"
            )

    def _ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        uploads = self._crowd.ask(requests)
        self._ledger.count("down", OVERHEAD, sum(map(len, requests.values())))
        self._ledger.count("up", OVERHEAD, sum(map(len, uploads.values())))
        return uploads


def make_call(
    config: PrivacyConfig, context: Context, keys: dict[int, bytes], sampled: int
) -> SumRequest:
    """The call for the sum of one exchange, to those of the sampled whose keys are known.

    The threshold counts all that were sampled. Where too few have a key, they refuse the call.
    """
    at = (context.task, context.round, context.exchange)
    nonce = f"{context.rng.key('secagg-call', *at):016x}"
    session = Session(*at, context.attempt, nonce)
    grid = FixedPoint(config.bits, config.precision, max(1, len(keys)))
    return SumRequest(session, keys, min_survivors(sampled, config.threshold), grid, config.at_once)


def _device_of(uploads: StackedUploads) -> torch.device:
    """Where the model lives, and sums must go back to: masks are made on the CPU."""
    tensors = (tensor for part in uploads.fields.values() for tensor in part.value.values())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _one(uploads: StackedUploads, row: int) -> Upload:
    """One client's upload out of a stack."""
    fields: dict[str, Field] = {}
    for name, part in uploads.fields.items():
        if isinstance(part, Each):
            raise RunError(
                f"privacy.secagg: the method sends the field {name!r} as Each, "
                "which secure aggregation cannot hide; its Needs.per_client_fields do not name it"
            )
        fields[name] = Sum({key: t[row] for key, t in part.value.items()}, part.weight)
    return fields
