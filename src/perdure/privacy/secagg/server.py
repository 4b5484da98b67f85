"""The server's half of a secure sum: it sees masked rows, and opens their sum alone."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from perdure.contract.uploads import CollectedUploads
from perdure.privacy.secagg import shamir
from perdure.privacy.secagg.errors import BelowThreshold, MalformedMessage
from perdure.privacy.secagg.fixed_point import Vector
from perdure.privacy.secagg.keys import commit, expand_mask, xor
from perdure.privacy.secagg.wire import (
    Declined,
    DropoutRequest,
    Masked,
    Seeds,
    Shares,
    SumRequest,
    UnmaskRequest,
    decode,
    decode_either,
    encode,
)

log = logging.getLogger(__name__)
Ask = Callable[[dict[int, bytes]], Mapping[int, bytes]]
"""Sends each client its request and returns the answers that came."""


@dataclass
class SecAggServer:
    """One secure sum: `receive` every upload, then `finish`."""

    call: SumRequest
    declined: dict[int, str] = field(default_factory=dict)
    """Clients that could not take part, and why."""
    refused: dict[int, str] = field(default_factory=dict)
    """Clients of which a message was refused, and why. Without another one they are gone."""
    _uploads: dict[int, Masked] = field(default_factory=dict)
    _members: list[int] | None = None
    """Who is left, once uploads are closed."""
    _seeds: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Member -> one who is gone -> the seed of their common mask."""
    _selves: dict[int, bytes] = field(default_factory=dict)
    """Seeds of self-masks that were opened."""

    # ---- uploads

    def receive(self, client: int, data: bytes) -> None:
        """Take a client's upload; a bad one is noted in `refused`, and its client is gone."""
        try:
            message = decode_either(data, Masked, Declined)
            self._check_sender(message.client, message.context, client)
            if isinstance(message, Declined):
                self.declined[client] = message.reason
                return
            self._check(message)
        except MalformedMessage as error:
            self._refuse(client, str(error))
        else:
            self._uploads[client] = message

    def _check_sender(self, named: int, context: bytes, client: int) -> None:
        if client not in self.call.keys or named != client:
            raise MalformedMessage(
                f"a message in the name of client {named} came from client {client}"
            )
        if context != self.call.context:
            raise MalformedMessage("a message belongs to another call")

    def _check(self, message: Masked) -> None:
        if message.client in self._uploads:
            raise MalformedMessage("a second upload")
        if self._members is not None:
            raise MalformedMessage("an upload came after the others were asked to do without it")
        peers = set(self.call.keys) - {message.client}
        pads = peers if self.call.at_once else set()
        if not (set(message.sealed) == set(message.commits) == peers and set(message.pads) == pads):
            raise MalformedMessage("an upload does not have one entry for each peer")
        row = message.row
        if row.dtype != self.call.grid.dtype or len(row) != message.layout.size:
            raise MalformedMessage("an upload's row does not have the size of its fields")

    def _refuse(self, client: int, reason: str) -> None:
        log.warning("secure sum: the message of client %d was refused: %s", client, reason)
        self.refused[client] = reason

    def sizes(self, client: int) -> dict[str, int]:
        """Bytes of a client's masked values by field; empty for who sent none."""
        upload = self._uploads.get(client)
        if upload is None:
            return {}
        width = self.call.grid.dtype.itemsize
        found = dict.fromkeys(upload.layout.fields, width)  # the field's weight
        for slot in upload.layout.slots:
            found[slot.field] += width * slot.size
        return found

    # ---- opening the sum

    @property
    def members(self) -> list[int]:
        """The clients whose values are in the sum."""
        return sorted(self._uploads) if self._members is None else self._members

    def requests(self) -> dict[int, bytes]:
        """What must be asked next, by client; empty when the sum can be opened.

        Raises TooFew when fewer clients are left than the threshold.
        """
        if self._members is None:
            self._close()
        if len(self.members) < self.call.threshold:
            raise BelowThreshold(
                f"{len(self.members)} of {len(self.call.keys)} clients are left, "
                f"the threshold is {self.call.threshold}"
            )
        if set(self._selves) >= set(self.members):
            return {}
        if any(self._unsettled(member) for member in self.members):
            request = encode(DropoutRequest(self.call.context, tuple(self.members)))
            return dict.fromkeys(self.members, request)
        return {member: encode(self._open_request(member)) for member in self.members}

    def _close(self) -> None:
        self._keep_usual_layout()
        self._members = sorted(self._uploads)
        if self.call.at_once and self._members == self.call.clients:
            for member in self._members:
                self._know(member, self._uncovered(member))

    def _keep_usual_layout(self) -> None:
        """Rows can only be added that stand for the same: those like most of the others."""
        layouts = Counter(upload.layout for upload in self._uploads.values())
        for client, upload in list(self._uploads.items()):
            if upload.layout != layouts.most_common(1)[0][0]:
                del self._uploads[client]
                self._refuse(client, "an upload has other fields or shapes than most")

    def _uncovered(self, member: int) -> bytes:
        """A self-mask's seed by the pads of all others, who all uploaded."""
        seed = self._uploads[member].covered
        for peer, upload in self._uploads.items():
            if peer != member:
                seed = xor(seed, upload.pads[member])
        return seed

    def _know(self, member: int, seed: bytes | None) -> None:
        """Keep a self-mask's seed if it is the one that the member committed to."""
        if seed is not None and commit(seed) == self._uploads[member].commit:
            self._selves[member] = seed

    def _gone(self) -> list[int]:
        return [client for client in self.call.clients if client not in self.members]

    def _unsettled(self, member: int) -> bool:
        return not set(self._seeds.get(member, {})) >= set(self._gone())

    def _open_request(self, receiver: int) -> UnmaskRequest:
        others = [member for member in self.members if member != receiver]
        sealed = {member: self._uploads[member].sealed[receiver] for member in others}
        return UnmaskRequest(self.call.context, tuple(self.members), sealed)

    def take(self, answers: Mapping[int, bytes]) -> None:
        """The answers to the last requests. Whoever did not settle is gone from then on."""
        if any(self._unsettled(member) for member in self.members):
            self._take_seeds(answers)
        else:
            self._take_shares(answers)

    def _take_seeds(self, answers: Mapping[int, bytes]) -> None:
        for client, data in answers.items():
            try:
                message = decode(data, Seeds)
                self._check_sender(message.client, message.context, client)
                self._check_seeds(message)
            except MalformedMessage as error:
                self._refuse(client, str(error))
            else:
                self._seeds[client] = dict(message.seeds)
        gone = self._gone()
        self._members = [m for m in self.members if set(self._seeds.get(m, {})) >= set(gone)]

    def _check_seeds(self, message: Seeds) -> None:
        if set(message.seeds) != set(self._gone()) or message.client not in self.members:
            raise MalformedMessage("not one seed for each client that is gone")
        known = self._uploads[message.client].commits
        for client, seed in message.seeds.items():
            if commit(seed) != known[client]:
                raise MalformedMessage(
                    f"the seed shared with client {client} is not the one promised"
                )

    def _take_shares(self, answers: Mapping[int, bytes]) -> None:
        points = self.call.points()
        found: dict[int, Mapping[int, bytes]] = {}
        for client, data in answers.items():
            try:
                message = decode(data, Shares)
                self._check_sender(message.client, message.context, client)
                if set(message.shares) != set(self.members) or client not in self.members:
                    raise MalformedMessage("not one share for each member")
            except MalformedMessage as error:
                self._refuse(client, str(error))
            else:
                found[client] = message.shares
        if len(found) < self.call.threshold:
            raise BelowThreshold(
                f"{len(found)} of {len(self.call.keys)} clients gave their shares, "
                f"the threshold is {self.call.threshold}"
            )
        chosen = sorted(found)[: self.call.threshold]
        weights = shamir.weights_at_zero([points[client] for client in chosen])
        for member in self.members:
            shares = {points[client]: found[client][member] for client in chosen}
            self._know(member, shamir.combine(shares, weights))
        if not set(self._selves) >= set(self.members):
            raise BelowThreshold("the shares that came do not belong together")

    # ---- the sum

    def report(self) -> CollectedUploads:
        """The opened sum."""
        members = self.members
        layout = self._uploads[members[0]].layout
        return layout.report(self.call.grid.decode(self._total(layout.size)), members)

    def _total(self, size: int) -> Vector:
        grid = self.call.grid
        total = grid.zeros(size)
        for member in self.members:
            total += self._uploads[member].row
            total -= expand_mask(self._selves[member], size, grid)
            for client in self._gone():
                mask = expand_mask(self._seeds[member][client], size, grid)
                apply = np.subtract if member < client else np.add
                apply(total, mask, out=total)
        return total


def finish(aggregator: SecAggServer, ask: Ask) -> CollectedUploads:
    """Ask until the sum can be opened, and open it; TooFew when it cannot be."""
    while requests := aggregator.requests():
        aggregator.take(ask(requests))
    return aggregator.report()
