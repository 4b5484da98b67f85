"""A client's half of a secure sum.

What it sends in a call is x + self-mask + masks shared with each peer. Two kinds of secret cover x,
and a participant never reveals both: of a call it tells either (with the peers) how to take its own
self-mask away, or (by the peers) the masks that it shares with them, never the one after the other.
It decides by what it is asked, and refuses whatever does not fit to what it answered before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from perdure.contract.uploads import Upload
from perdure.core.trees import Tree
from perdure.privacy.secagg import shamir
from perdure.privacy.secagg.errors import MalformedMessage, UnsafeRequest
from perdure.privacy.secagg.keys import (
    PairSecrets,
    TaskKeys,
    commit,
    expand_mask,
    seal,
    unseal,
    xor,
)
from perdure.privacy.secagg.layout import Row, layout_of, row_of
from perdure.privacy.secagg.transport import MIN_CLIENTS
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

NOT_FINITE = "not finite"
"""Why a client declines whose values are not."""
_COEFFICIENT_BYTES = 48
"""Reduced modulo the prime of 257 bits, uniform but for 2^-127."""


@dataclass
class _Memory:
    """What a participant did in a call."""

    call: SumRequest
    row: bytes
    """A digest of what it sent: the same masks must not cover two rows."""
    members: set[int]
    """Who was left when it was last asked."""
    opened: tuple[int, ...] | None = None
    """The members whose self-masks it gave its shares of."""

    def tree(self) -> Tree:
        """As a tree that can be saved."""
        opened = None if self.opened is None else list(self.opened)
        members, row = sorted(self.members), self.row.hex()
        return {"call": encode(self.call).hex(), "row": row, "members": members, "opened": opened}

    @classmethod
    def from_tree(cls, tree: Tree) -> _Memory:
        """The inverse of tree."""
        call, opened = decode(bytes.fromhex(tree["call"]), SumRequest), tree["opened"]
        opened = None if opened is None else tuple(opened)
        return cls(call, bytes.fromhex(tree["row"]), set(tree["members"]), opened)


@dataclass
class SecAggClient:
    """One client in the sums of one task. `keys` are new for every task."""

    keys: TaskKeys
    _calls: dict[bytes, _Memory] = field(default_factory=dict)

    @property
    def client(self) -> int:
        """Its number."""
        return self.keys.client

    # ---- what a node keeps between two messages

    def tree(self) -> Tree:
        """All that it must remember (its secrets too), as a tree that can be saved."""
        return {
            "client": self.client,
            "master": self.keys.master.hex(),
            "calls": [memory.tree() for memory in self._calls.values()],
        }

    @classmethod
    def from_tree(cls, tree: Tree) -> SecAggClient:
        """The inverse of tree."""
        keys = TaskKeys(tree["client"], bytes.fromhex(tree["master"]))
        calls = [_Memory.from_tree(memory) for memory in tree["calls"]]
        return cls(keys, {memory.call.context: memory for memory in calls})

    def forget(self) -> None:
        """Drop what it remembers of past sums, which will never be asked about again."""
        self._calls.clear()

    # ---- the upload

    def upload(self, call: bytes, fields: Upload, weight: float) -> bytes:
        """The one message of a round in which nobody drops out.

        Whether all values are finite and small enough to be summed is checked here, because nobody
        could see it afterwards; a client with other values declines.
        """
        asked = decode(call, SumRequest)
        self._check(asked)
        row = row_of(fields, weight)
        if not asked.grid.fits(row):
            return encode(Declined(self.client, asked.context, _fault(row, asked)))
        self._remember(asked, row)
        return encode(self._masked(asked, fields, row))

    def _check(self, call: SumRequest) -> None:
        """Refuse a call that would not protect this client."""
        count = len(call.keys)
        if count < MIN_CLIENTS:
            raise UnsafeRequest(f"client {self.client}: a sum of {count} clients hides too little")
        if call.keys.get(self.client) != self.keys.public:
            raise UnsafeRequest(f"client {self.client}: the call does not hold its key")
        if not max(2, count // 2 + 1) <= call.threshold <= count:
            raise UnsafeRequest(
                f"client {self.client}: a threshold of {call.threshold} of {count} clients "
                "is not a majority of at least two"
            )
        if call.grid.clients < count:
            raise UnsafeRequest(f"client {self.client}: a sum of {count} clients could overflow")

    def _remember(self, call: SumRequest, row: Row) -> None:
        digest = hashlib.sha256(row.tobytes()).digest()
        memory = self._calls.setdefault(call.context, _Memory(call, digest, set(call.clients)))
        if memory.row != digest:
            raise UnsafeRequest(
                f"client {self.client}: another row was sent under these masks already"
            )

    def _masked(self, call: SumRequest, fields: Upload, row: Row) -> Masked:
        bonds, seed = self._bonds(call), self._seed(call)
        masked = call.grid.encode(row)
        masked += expand_mask(seed, len(masked), call.grid)
        for peer, bond in bonds.items():
            mask = expand_mask(bond.seed, len(masked), call.grid)
            apply = np.add if self.client < peer else np.subtract
            apply(masked, mask, out=masked)
        covered = seed if call.at_once else b""
        for bond in bonds.values() if call.at_once else ():
            covered = xor(covered, bond.own_pad)
        shares = self._shares(call, seed)
        return Masked(
            client=self.client,
            context=call.context,
            layout=layout_of(fields),
            row=masked,
            commit=commit(seed),
            sealed={peer: seal(bond.to_peer, shares[peer]) for peer, bond in bonds.items()},
            commits={peer: commit(bond.seed) for peer, bond in bonds.items()},
            covered=covered,
            pads={p: bond.peer_pad for p, bond in bonds.items()} if call.at_once else {},
        )

    def _bonds(self, call: SumRequest) -> dict[int, PairSecrets]:
        return {
            peer: self.keys.bond(peer, call.keys[peer], call.context)
            for peer in call.clients
            if peer != self.client
        }

    def _seed(self, call: SumRequest) -> bytes:
        """Of the self-mask."""
        return self.keys.secret("perdure self-mask", call.context)

    def _shares(self, call: SumRequest, seed: bytes) -> dict[int, bytes]:
        """A share of the self-mask's seed for everybody, this client too."""
        points, count = call.points(), call.threshold - 1
        size = _COEFFICIENT_BYTES
        random = b"".join(
            self.keys.secret(f"perdure coefficient {k}", call.context, size) for k in range(count)
        )

        def coefficient(power: int) -> int:
            return int.from_bytes(random[(power - 1) * size : power * size], "little")

        found = shamir.share(seed, list(points.values()), call.threshold, coefficient)
        return {client: found[point] for client, point in points.items()}

    # ---- where somebody dropped out

    def answer(self, request: bytes) -> bytes:
        """The answer to a SettleRequest or an OpenRequest; Refused if it would reveal too much."""
        asked = decode_either(request, DropoutRequest, UnmaskRequest)
        memory = self._calls.get(asked.context)
        if memory is None:
            raise UnsafeRequest(f"client {self.client}: asked about a sum that it has no part in")
        self._check_members(asked.members, memory)
        if isinstance(asked, DropoutRequest):
            return encode(self._settle(asked, memory))
        return encode(self._open(asked, memory))

    def _check_members(self, asked: tuple[int, ...], memory: _Memory) -> None:
        members = set(asked)
        if len(members) != len(asked) or self.client not in members:
            raise UnsafeRequest(f"client {self.client}: asked about members that it is not one of")
        if len(members) < memory.call.threshold:
            raise UnsafeRequest(
                f"client {self.client}: {len(members)} members are fewer than the threshold "
                f"{memory.call.threshold}"
            )
        if not members <= memory.members:
            raise UnsafeRequest(f"client {self.client}: a client that was gone is said to be back")

    def _settle(self, asked: DropoutRequest, memory: _Memory) -> Seeds:
        if memory.opened not in (None, tuple(sorted(asked.members))):
            raise UnsafeRequest(
                f"client {self.client}: the members were final when it gave its shares"
            )
        memory.members = set(asked.members)
        bonds = self._bonds(memory.call)
        gone = [peer for peer in bonds if peer not in memory.members]
        return Seeds(self.client, asked.context, {peer: bonds[peer].seed for peer in gone})

    def _open(self, asked: UnmaskRequest, memory: _Memory) -> Shares:
        members = tuple(sorted(asked.members))
        if memory.opened not in (None, members) or set(members) != memory.members:
            raise UnsafeRequest(
                f"client {self.client}: the final members are not those it settled on"
            )
        bonds, call = self._bonds(memory.call), memory.call
        if set(asked.sealed) != set(members) - {self.client}:
            raise MalformedMessage(f"client {self.client}: not one share of each other member")
        shares = {p: unseal(bonds[p].from_peer, text) for p, text in asked.sealed.items()}
        shares[self.client] = self._shares(call, self._seed(call))[self.client]
        memory.opened = members
        return Shares(self.client, asked.context, shares)


def _fault(row: Row, call: SumRequest) -> str:
    """Why a row cannot be sent."""
    size = float(abs(row).max())
    if size != size or size == float("inf"):
        return NOT_FINITE
    return (
        f"a weighted value of {size:.3g} is above the limit {call.grid.limit:.3g} that "
        "privacy.bits and privacy.precision leave"
    )
