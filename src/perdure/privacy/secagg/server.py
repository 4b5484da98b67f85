"""The server's side of a secure sum: it sees masked rows, and opens nothing but their sum."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from perdure.contract.uploads import CollectedUploads
from perdure.privacy.secagg import messages
from perdure.privacy.secagg.keys import (
    combine_shares,
    commit,
    expand_mask,
    weights_at_zero,
    xor,
)
from perdure.privacy.secagg.layout import KEY_BYTES, Vector
from perdure.privacy.secagg.messages import (
    BelowThreshold,
    MalformedMessage,
    MaskedRow,
    SumRequest,
    Survivors,
    decode,
    decode_either,
    encode,
)

log = logging.getLogger(__name__)
Ask = Callable[[dict[int, bytes]], Mapping[int, bytes]]
"""Sends each client its request, and returns the answers that arrived."""


@dataclass
class SecAggServer:
    """One secure sum: call `receive_upload` for every upload, then `open_sum`."""

    request: SumRequest
    """The request that was sent to the clients."""
    known: Survivors | None = None
    """What clients last received about survivors, also before a restart. If None, nothing."""
    declined: dict[int, str] = field(default_factory=dict)
    """Clients that declined to upload, and why."""
    refused: dict[int, str] = field(default_factory=dict)
    """Clients of which a message was refused, and why."""
    _rows: dict[int, MaskedRow] = field(default_factory=dict)
    _survivors: list[int] | None = None
    """The clients that are left. None while uploads arrive."""
    _pair_seeds: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Survivor -> client that dropped out -> seed of their common mask."""
    _self_seeds: dict[int, bytes] = field(default_factory=dict)
    """Seeds of the self-masks that were opened."""

    # ---- uploads

    def receive_upload(self, client: int, data: bytes) -> None:
        """Add a client's upload; a bad one is noted in `refused`, as if the client dropped out."""
        try:
            message = decode_either(data, MaskedRow, messages.Declined)
            self._check_sender(message.client, message.request_digest, client)
            if isinstance(message, messages.Declined):
                self.declined[client] = message.reason
                return
            self._check_row(message)
        except MalformedMessage as error:
            self._refuse(client, str(error))
        else:
            self._rows[client] = message

    def _check_sender(self, named: int, request_digest: bytes, client: int) -> None:
        if client not in self.request.public_keys or named != client:
            raise MalformedMessage(
                f"the message names client {named} as its sender, but came from client {client}"
            )
        if request_digest != self.request.digest:
            raise MalformedMessage("the message belongs to another sum")

    def _check_row(self, message: MaskedRow) -> None:
        if message.client in self._rows:
            raise MalformedMessage("the client uploaded twice")
        if self._survivors is not None:
            raise MalformedMessage("the upload came after the sum was closed without it")
        peers = set(self.request.public_keys) - {message.client}
        pads = peers if self.request.single_message else set()
        shares, commitments = set(message.sealed_shares), set(message.pair_commitments)
        if not (shares == commitments == peers and set(message.pads) == pads):
            raise MalformedMessage("the upload does not have one entry per peer")
        if len(message.padded_seed) != (KEY_BYTES if self.request.single_message else 0):
            raise MalformedMessage("the upload does not have the seed under pads that is due")
        row = message.row
        if row.dtype != self.request.fixed_point.dtype or len(row) != message.layout.size:
            raise MalformedMessage("the upload's row does not have the size of its fields")

    def _refuse(self, client: int, reason: str) -> None:
        log.warning("secure sum: refused the message of client %d: %s", client, reason)
        self.refused[client] = reason

    def field_bytes(self, client: int) -> dict[str, int]:
        """Return the bytes of a client's masked values by field; empty if it has no upload."""
        message = self._rows.get(client)
        if message is None:
            return {}
        width = self.request.fixed_point.dtype.itemsize
        sizes = dict.fromkeys(message.layout.fields, width)  # the field's weight
        for slot in message.layout.slots:
            sizes[slot.field] += width * slot.size
        return sizes

    def reopen(self) -> None:
        """Accept further uploads after too few clients were left.

        Once clients know the survivors, only these can still upload. A client that declined did
        so for the whole exchange.
        """
        self._survivors, self.refused = None, {}

    # ---- opening the sum

    @property
    def survivors(self) -> list[int]:
        """The clients whose values are in the sum."""
        return sorted(self._rows) if self._survivors is None else self._survivors

    def next_requests(self) -> dict[int, bytes]:
        """Return the next request of each client; empty if the sum can be opened.

        Raises:
            BelowThreshold: Fewer clients are left than the threshold.

        """
        if self._survivors is None:
            self._close()
        self._check_final()
        if len(self.survivors) < self.request.threshold:
            raise BelowThreshold(
                f"{len(self.survivors)} of {len(self.request.public_keys)} clients are left, "
                f"the threshold is {self.request.threshold}"
            )
        if set(self._self_seeds) >= set(self.survivors):
            return {}
        if self._lacks_pair_seeds():
            self._set_known(final=False)
            message = messages.DropoutRequest(self.request.digest, tuple(self.survivors))
            return dict.fromkeys(self.survivors, encode(message))
        self._set_known(final=True)
        return {survivor: encode(self._unmask_request(survivor)) for survivor in self.survivors}

    def _close(self) -> None:
        self._drop_other_layouts()
        self._drop_unlisted()
        self._survivors = sorted(self._rows)
        if self.request.single_message and self._survivors == self.request.clients:
            self._set_known(final=True)
            for survivor in self._survivors:
                self._store_self_seed(survivor, self._seed_from_pads(survivor))

    def _drop_other_layouts(self) -> None:
        """Keep the rows with the most common layout: only equal layouts can be added."""
        layouts = Counter(message.layout for message in self._rows.values())
        for client, message in list(self._rows.items()):
            if message.layout != layouts.most_common(1)[0][0]:
                del self._rows[client]
                self._refuse(client, "the upload's fields or shapes differ from most others")

    def _drop_unlisted(self) -> None:
        """Remove rows of clients that are back, and that are no survivors for the others."""
        left = self.request.clients if self.known is None else self.known.clients
        for client in set(self._rows) - set(left):
            del self._rows[client]
            self._refuse(client, "the others know already that it dropped out of the sum")

    def _set_known(self, final: bool) -> None:
        """Note the survivors, which clients learn from the next requests."""
        was_final = self.known is not None and self.known.final
        self.known = Survivors(tuple(self.survivors), final or was_final)

    def _check_final(self) -> None:
        """Refuse to open a sum for fewer clients than it was opened for before.

        Raises:
            BelowThreshold: One of these clients is missing.

        """
        if self.known is not None and self.known.final:
            missing = [c for c in self.known.clients if c not in self.survivors]
            if missing:
                raise BelowThreshold(f"the sum was opened with clients {missing} before")

    def _seed_from_pads(self, client: int) -> bytes:
        """Return the seed of a client's self-mask, by the pads in all other uploads."""
        seed = self._rows[client].padded_seed
        for peer, message in self._rows.items():
            if peer != client:
                seed = xor(seed, message.pads[client])
        return seed

    def _store_self_seed(self, client: int, seed: bytes | None) -> None:
        """Store the seed of a self-mask if it is the one that the client committed to."""
        if seed is not None and commit(seed) == self._rows[client].self_commitment:
            self._self_seeds[client] = seed

    def _dropouts(self) -> list[int]:
        return [client for client in self.request.clients if client not in self.survivors]

    def _has_pair_seeds(self, survivor: int) -> bool:
        return set(self._pair_seeds.get(survivor, {})) >= set(self._dropouts())

    def _lacks_pair_seeds(self) -> bool:
        return not all(self._has_pair_seeds(survivor) for survivor in self.survivors)

    def _unmask_request(self, receiver: int) -> messages.UnmaskRequest:
        others = [client for client in self.survivors if client != receiver]
        sealed = {client: self._rows[client].sealed_shares[receiver] for client in others}
        return messages.UnmaskRequest(self.request.digest, tuple(self.survivors), sealed)

    def receive_answers(self, answers: Mapping[int, bytes]) -> None:
        """Add the answers to the last requests.

        A client that was asked for pair seeds and did not answer counts as dropped out.

        Raises:
            BelowThreshold: Too few clients gave shares, or the shares do not fit together.

        """
        if self._lacks_pair_seeds():
            self._receive_pair_seeds(answers)
        else:
            self._receive_seed_shares(answers)

    def _receive_pair_seeds(self, answers: Mapping[int, bytes]) -> None:
        for client, data in answers.items():
            try:
                message = decode(data, messages.PairSeeds)
                self._check_sender(message.client, message.request_digest, client)
                self._check_pair_seeds(message)
            except MalformedMessage as error:
                self._refuse(client, str(error))
            else:
                self._pair_seeds[client] = dict(message.seeds)
        self._survivors = [client for client in self.survivors if self._has_pair_seeds(client)]

    def _check_pair_seeds(self, message: messages.PairSeeds) -> None:
        if set(message.seeds) != set(self._dropouts()) or message.client not in self.survivors:
            raise MalformedMessage("not one seed per client that dropped out")
        commitments = self._rows[message.client].pair_commitments
        for client, seed in message.seeds.items():
            if commit(seed) != commitments[client]:
                raise MalformedMessage(
                    f"the seed shared with client {client} does not match its commitment"
                )

    def _receive_seed_shares(self, answers: Mapping[int, bytes]) -> None:
        shares = self._read_seed_shares(answers)
        if len(shares) < self.request.threshold:
            raise BelowThreshold(
                f"{len(shares)} of {len(self.request.public_keys)} clients gave their shares, "
                f"the threshold is {self.request.threshold}"
            )
        points = self.request.points()
        givers = sorted(shares)[: self.request.threshold]
        weights = weights_at_zero([points[giver] for giver in givers])
        for survivor in self.survivors:
            by_point = {points[giver]: shares[giver][survivor] for giver in givers}
            self._store_self_seed(survivor, combine_shares(by_point, weights))
        if not set(self._self_seeds) >= set(self.survivors):
            raise BelowThreshold("the shares do not belong together")

    def _read_seed_shares(self, answers: Mapping[int, bytes]) -> dict[int, Mapping[int, bytes]]:
        """Return the shares by the client that gave them, then by survivor."""
        shares: dict[int, Mapping[int, bytes]] = {}
        for client, data in answers.items():
            try:
                message = decode(data, messages.SeedShares)
                self._check_sender(message.client, message.request_digest, client)
                if set(message.shares) != set(self.survivors) or client not in self.survivors:
                    raise MalformedMessage("not one share per survivor")
            except MalformedMessage as error:
                self._refuse(client, str(error))
            else:
                shares[client] = message.shares
        return shares

    # ---- the sum

    def collected(self) -> CollectedUploads:
        """Return the opened sum."""
        layout = self._rows[self.survivors[0]].layout
        total = self.request.fixed_point.decode(self._total(layout.size))
        return layout.collected(total, self.survivors)

    def _total(self, size: int) -> Vector:
        fixed_point = self.request.fixed_point
        total = fixed_point.zeros(size)
        for survivor in self.survivors:
            total += self._rows[survivor].row
            total -= expand_mask(self._self_seeds[survivor], size, fixed_point)
            for client in self._dropouts():
                mask = expand_mask(self._pair_seeds[survivor][client], size, fixed_point)
                apply = np.subtract if survivor < client else np.add
                apply(total, mask, out=total)
        return total


def open_sum(server: SecAggServer, ask: Ask) -> CollectedUploads:
    """Ask the clients until the sum can be opened, and return it.

    Raises:
        BelowThreshold: Too few clients are left.

    """
    while requests := server.next_requests():
        server.receive_answers(ask(requests))
    return server.collected()
