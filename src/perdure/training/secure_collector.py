"""Secure aggregation within the loop: a collector of masked uploads."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from perdure.contract.context import Context
from perdure.contract.uploads import (
    CollectedUploads,
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    Upload,
    WeightBounds,
)
from perdure.core.errors import RunError
from perdure.core.trees import to_device
from perdure.privacy.chain import PrivacyChain
from perdure.privacy.mechanism import Place
from perdure.privacy.secagg.client import NOT_FINITE
from perdure.privacy.secagg.journal import MIN_CLIENTS, StartedSum
from perdure.privacy.secagg.keys import is_public_key
from perdure.privacy.secagg.layout import KEY_BYTES, OVERHEAD
from perdure.privacy.secagg.messages import BelowThreshold, encode
from perdure.privacy.secagg.server import SecAggServer, open_sum
from perdure.training.collector import UploadCollector
from perdure.training.ledger import Ledger

log = logging.getLogger(__name__)


class SecureUploadCollector(UploadCollector):
    """Collects masked uploads of one exchange, and opens their sum when it is closed."""

    is_incremental = False

    def __init__(
        self,
        chain: PrivacyChain,
        place: Place,
        clients: list[int],
        ledger: Ledger,
        bounds: WeightBounds | None = None,
        excluded: Collection[int] = (),
    ) -> None:
        """Ask the clients for keys and announce the sum, or the one that the journal has for this.

        Raises:
            RunError: There are too few participants for a sum that hides them.

        """
        super().__init__()
        context, sums = place.context, chain.sums
        assert sums is not None
        assert sums.transport is not None
        if 0 < len(clients) < MIN_CLIENTS:
            raise RunError(
                f"task {context.task + 1}: a secure sum needs at least {MIN_CLIENTS} clients, and "
                f"{len(clients)} have enough data of the task; the run stops at its last checkpoint"
            )
        self._chain, self._place, self._ledger = chain, place, ledger
        self._sums, self._transport = sums, sums.transport
        self._bounds = bounds if bounds is None else chain.limit_weights(bounds, place)
        self._device = torch.device("cpu")
        self._journal = sums.journal
        self.uploaded |= set(excluded)
        started = self._journal.at(context.position)
        if started is None or started.request.session.attempt != context.attempt:
            keys = self._valid_keys(self._transport.public_keys(context.task, clients))
            request = sums.request(context, keys, len(clients), self._bounds)
            started = StartedSum(request, tuple(clients), tuple(excluded))
            self._journal.add(started)
        self._server = SecAggServer(started.request, started.known)
        self._announce(encode(started.request), started.request.clients)

    def _valid_keys(self, keys: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return the keys that others can use; the owners of all others are left out of the sum."""
        valid = {client: key for client, key in keys.items() if is_public_key(key)}
        reason = "its public key is not valid"
        self.failures += [FailedUpload(c, reason, True) for c in keys if c not in valid]
        return valid

    def _announce(self, sum_request: bytes, clients: list[int]) -> None:
        self._transport.announce(sum_request)
        if not clients:
            return
        newcomers = self._ledger.first_deliveries("secagg keys", clients)
        self._ledger.add_bytes("up", OVERHEAD, dict.fromkeys(newcomers, KEY_BYTES))
        self._ledger.add_bytes("down", OVERHEAD, dict.fromkeys(clients, len(sum_request)))

    def reopen(self, context: Context) -> SecureUploadCollector:
        """Return this collector for another attempt, in which the missing clients upload."""
        self._server.reopen()
        self._place, self.abort_reason = replace(self._place, context=context), None
        self.failures, self.rejected = [], []
        for client, reason in self._server.declined.items():
            self._note_declined(client, reason)
        self._announce(encode(self._server.request), self.missing)
        return self

    @property
    def missing(self) -> list[int]:
        """The clients of the sum that have neither uploaded nor declined."""
        done = {*self._server.survivors, *self._server.declined}
        return [client for client in self._server.request.clients if client not in done]

    def add(self, uploads: StackedUploads | MaskedUpload | FailedUpload) -> None:
        """Add uploads; those of simulated clients are masked first, one by one."""
        if isinstance(uploads, FailedUpload):
            if uploads.client not in {failure.client for failure in self.failures}:
                self.failures.append(uploads)
        elif isinstance(uploads, MaskedUpload):
            self._receive(uploads.client, uploads.data)
        else:
            uploads = self._chain.on_clients(uploads, self._place)
            self._device = _device_of(uploads)
            for row, client in enumerate(uploads.clients):
                fields, weight = _unstack(uploads, row), uploads.weights[row]
                masked = self._sums.seal(client, fields, weight, self._place)
                self._receive(client, masked)

    def _receive(self, client: int, data: bytes) -> None:
        server = self._server
        server.receive_upload(client, data)
        self.uploaded.add(client)  # also if it declined: it takes part in no other sum of the round
        if client in server.declined:
            self._note_declined(client, server.declined[client])
        sizes = server.field_bytes(client)
        for name, size in sizes.items():
            self._ledger.add_bytes("up", name, {client: size})
            self._ledger.types[name] = "Sum"
        self._ledger.add_bytes("up", OVERHEAD, {client: len(data) - sum(sizes.values())})

    def _note_declined(self, client: int, reason: str) -> None:
        """Note a client that declined; values that are not finite count as rejected."""
        if reason == NOT_FINITE:
            self.rejected.append(client)
        else:
            self.failures.append(FailedUpload(client, reason, answered=True))

    def close(self) -> None:
        """Open the sum.

        Below the threshold `abort_reason` is set, so that the exchange is repeated.

        Raises:
            RunError: The last of `privacy.attempts` attempts failed, or a client lied about its
                weight.

        """
        server = self._server
        has_messages = server.survivors or server.declined or server.refused
        if not has_messages and (self.empty_uploads or not self.failures):
            return  # no client had anything to send
        try:
            self.collected = self._checked(open_sum(server, self._ask))
        except BelowThreshold as error:
            self._note_refused()
            self._abort(str(error))
        else:
            self._note_known()
            self._note_refused()
            self.collected = self._chain.on_server(self.collected, self._place)
        self.collected.sums = to_device(self.collected.sums, self._device)

    def _checked(self, uploads: CollectedUploads) -> CollectedUploads:
        """Return an opened sum whose total weights are possible.

        Nobody can tell which client's weight is not, so the exchange cannot continue without it.
        """
        rounding = len(uploads.clients) * 2.0**-self._sums.privacy.precision
        reason = self._bounds.impossible(uploads, rounding) if self._bounds is not None else None
        if reason is not None:
            raise RunError(
                f"{self._where}: the secure sum is rejected, since a client sent a weight that "
                f"it does not have ({reason}); the run stops at its last checkpoint"
            )
        return uploads

    @property
    def _where(self) -> str:
        return f"task {self._place.context.task + 1} round {self._place.context.round + 1}"

    def _note_refused(self) -> None:
        refused = self._server.refused.items()
        counted = set(self.collected.clients)
        self.failures += [
            FailedUpload(client, reason, answered=True)
            for client, reason in refused
            if client not in counted
        ]

    def _abort(self, reason: str) -> None:
        context, position = self._place.context, self._where
        left_out = [f"client {client}: not finite" for client in self.rejected]
        left_out += [f"client {failure.client}: {failure.reason}" for failure in self.failures]
        self.abort_reason = "; ".join([reason, *left_out])
        log.warning("%s: no secure sum: %s", position, self.abort_reason)
        if context.attempt + 1 >= self._sums.privacy.attempts:
            raise RunError(
                f"{position}: no secure sum in {self._sums.privacy.attempts} attempts "
                f"(privacy.attempts), the last time because {self.abort_reason}; the run stops at "
                "its last checkpoint"
            )

    def _note_known(self) -> None:
        if self._server.known is not None:
            self._journal.add_survivors(self._place.context.position, self._server.known)

    def _ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        self._note_known()
        answers = self._transport.ask(requests)
        for direction, messages in (("down", requests), ("up", answers)):
            sizes = {client: len(message) for client, message in messages.items()}
            self._ledger.add_bytes(direction, OVERHEAD, sizes)
        return answers


def _device_of(uploads: StackedUploads) -> torch.device:
    """Return the device of the uploads, to which sums are moved: masks are made on the CPU."""
    tensors = (tensor for part in uploads.fields.values() for tensor in part.value.values())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _unstack(uploads: StackedUploads, row: int) -> Upload:
    """Return one client's upload of a stack."""
    return {
        name: replace(field, value={key: tensor[row] for key, tensor in field.value.items()})
        for name, field in uploads.fields.items()
    }
