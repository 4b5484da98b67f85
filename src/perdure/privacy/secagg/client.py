"""One client's side of a secure sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from perdure.contract.uploads import Upload
from perdure.core.rng import Rng
from perdure.core.trees import Tree
from perdure.privacy.secagg import messages
from perdure.privacy.secagg.journal import MIN_CLIENTS
from perdure.privacy.secagg.keys import (
    PairSecrets,
    TaskKeys,
    commit,
    expand_mask,
    seal,
    split_secret,
    unseal,
    xor,
)
from perdure.privacy.secagg.layout import KEY_BYTES, Row, layout_of, row_of
from perdure.privacy.secagg.messages import (
    MalformedMessage,
    SumRequest,
    UnsafeRequest,
    decode,
    decode_either,
    encode,
)

# ---- What a client did in one secure sum, so that it never contradicts itself


@dataclass
class SumRecord:
    """What a client did in one sum."""

    request: SumRequest
    """The request for the sum."""
    row_digest: bytes
    """Digest of the masked row that was sent: the same masks must not cover two rows. Empty if the
    client declined."""
    survivors: set[int]
    """Clients that were left at the last request."""
    unmasked: tuple[int, ...] | None = None
    """Clients for whose self-masks this client gave its shares. If None, it gave none."""

    def to_tree(self) -> Tree:
        """Return the record as a tree that can be saved."""
        return {
            "request": encode(self.request).hex(),
            "row_digest": self.row_digest.hex(),
            "survivors": sorted(self.survivors),
            "unmasked": None if self.unmasked is None else list(self.unmasked),
        }

    @classmethod
    def from_tree(cls, tree: Tree) -> SumRecord:
        """Restore a record from `to_tree`."""
        request, unmasked = decode(bytes.fromhex(tree["request"]), SumRequest), tree["unmasked"]
        unmasked = None if unmasked is None else tuple(unmasked)
        return cls(request, bytes.fromhex(tree["row_digest"]), set(tree["survivors"]), unmasked)


# ---- One client's side of a secure sum
#
# An upload is x + self-mask + masks shared with each peer. Two kinds of secrets cover x, and of one
# client both are never revealed in one sum: either its self-mask is revealed (with the help of its
# peers), or the masks that it shares with them (by the peers), but not one after the other. The
# client decides by the requests it gets, and refuses requests that contradict its earlier answers.

NOT_FINITE = "not finite"
"""Reason of a client that declines because its values are not finite."""
_COEFFICIENT_BYTES = 48
"""Random bytes per coefficient: modulo the prime of 257 bits they are uniform up to 2^-127."""


@dataclass
class SecAggClient:
    """One client in the secure sums of one task."""

    keys: TaskKeys
    """Keys of the client, new for every task."""
    _records: dict[bytes, SumRecord] = field(default_factory=dict)

    @property
    def client(self) -> int:
        """Index of the client."""
        return self.keys.client

    # ---- storing

    def to_tree(self) -> Tree:
        """Return all state, including the secrets, as a tree that can be saved."""
        return {
            "client": self.client,
            "master": self.keys.master.hex(),
            "records": [record.to_tree() for record in self._records.values()],
        }

    @classmethod
    def from_tree(cls, tree: Tree) -> SecAggClient:
        """Restore a client from `to_tree`."""
        keys = TaskKeys(tree["client"], bytes.fromhex(tree["master"]))
        records = [SumRecord.from_tree(record) for record in tree["records"]]
        return cls(keys, {record.request.digest: record for record in records})

    def forget_before(self, position: tuple[int, int, int]) -> None:
        """Drop the records of all positions but this one, about which no request will come."""
        kept = self._records.items()
        self._records = {d: r for d, r in kept if r.request.session.position == position}

    # ---- uploading

    def upload(self, sum_request: bytes, fields: Upload, weight: float) -> bytes:
        """Return the client's upload under masks.

        The client itself checks that all values are finite and small enough to be summed, because
        they cannot be checked under masks; with other values it declines.

        Raises:
            UnsafeRequest: The request would not protect the client, or another row was already sent
                for it.
            MalformedMessage: `sum_request` is not a valid request.

        """
        request = decode(sum_request, SumRequest)
        self._check(request)
        reply = self._reply(request, fields, row_of(fields, weight))
        self._record(request, reply)
        return encode(reply)

    def _reply(
        self, request: SumRequest, fields: Upload, row: Row
    ) -> messages.MaskedRow | messages.Declined:
        if request.fixed_point.fits(row):
            return self._masked_row(request, fields, row)
        return messages.Declined(self.client, request.digest, _decline_reason(row, request))

    def remember(self, sum_request: bytes, upload: bytes) -> None:
        """Record an upload that was made and stored before this process started.

        Raises:
            UnsafeRequest: As of `upload`.

        """
        request = decode(sum_request, SumRequest)
        self._check(request)
        self._record(request, decode_either(upload, messages.MaskedRow, messages.Declined))

    def _check(self, request: SumRequest) -> None:
        """Refuse a request that would not protect this client."""
        count = len(request.public_keys)
        if count < MIN_CLIENTS:
            raise UnsafeRequest(f"client {self.client}: a sum of {count} clients hides too little")
        if request.public_keys.get(self.client) != self.keys.public:
            raise UnsafeRequest(f"client {self.client}: the request does not include its key")
        if not max(MIN_CLIENTS, count // 2 + 1) <= request.threshold <= count:
            raise UnsafeRequest(
                f"client {self.client}: a threshold of {request.threshold} of {count} clients "
                f"is not a majority of at least {MIN_CLIENTS}"
            )
        if request.fixed_point.clients < count:
            raise UnsafeRequest(f"client {self.client}: a sum of {count} clients could overflow")
        self._check_first(request)

    def _check_first(self, request: SumRequest) -> None:
        """Refuse a second sum of one round: the difference of the two could be one client."""
        position, digest = request.session.position, request.digest
        if any(
            r.request.session.position == position for d, r in self._records.items() if d != digest
        ):
            raise UnsafeRequest(
                f"client {self.client}: it took part in another sum of task {position[0] + 1}, "
                f"round {position[1] + 1}, exchange {position[2]}"
            )

    def _record(self, request: SumRequest, reply: messages.MaskedRow | messages.Declined) -> None:
        """Record a reply, also one that declines: else a server could ask until it does not."""
        digest = b""
        if isinstance(reply, messages.MaskedRow):
            digest = hashlib.sha256(reply.row.tobytes()).digest()
        new = SumRecord(request, digest, set(request.clients))
        record = self._records.setdefault(request.digest, new)
        if record.row_digest != digest:
            raise UnsafeRequest(
                f"client {self.client}: another row was already sent under these masks"
            )

    def _masked_row(self, request: SumRequest, fields: Upload, row: Row) -> messages.MaskedRow:
        pairs, seed = self.pair_secrets(request), self.self_seed(request)
        masked = request.fixed_point.encode(row)
        masked += expand_mask(seed, len(masked), request.fixed_point)
        for peer, pair in pairs.items():
            mask = expand_mask(pair.seed, len(masked), request.fixed_point)
            apply = np.add if self.client < peer else np.subtract
            apply(masked, mask, out=masked)
        padded_seed = seed if request.single_message else b""
        for pair in pairs.values() if request.single_message else ():
            padded_seed = xor(padded_seed, pair.client_pad)
        shares = self._seed_shares(request, seed)
        return messages.MaskedRow(
            client=self.client,
            request_digest=request.digest,
            layout=layout_of(fields),
            row=masked,
            self_commitment=commit(seed),
            sealed_shares={p: seal(pair.send_key, shares[p]) for p, pair in pairs.items()},
            pair_commitments={peer: commit(pair.seed) for peer, pair in pairs.items()},
            padded_seed=padded_seed,
            pads={p: pair.peer_pad for p, pair in pairs.items()} if request.single_message else {},
        )

    def pair_secrets(self, request: SumRequest) -> dict[int, PairSecrets]:
        return {
            peer: self.keys.pair_secrets(peer, request.public_keys[peer], request.digest)
            for peer in request.clients
            if peer != self.client
        }

    def self_seed(self, request: SumRequest) -> bytes:
        """Return the seed of the self-mask."""
        return self.keys.secret("perdure self-mask", request.digest)

    def _seed_shares(self, request: SumRequest, seed: bytes) -> dict[int, bytes]:
        """Return one share of the self-mask's seed per client, including this one."""
        points, size = request.points(), _COEFFICIENT_BYTES
        random = b"".join(
            self.keys.secret(f"perdure coefficient {k}", request.digest, size)
            for k in range(request.threshold - 1)
        )

        def coefficient(power: int) -> int:
            return int.from_bytes(random[(power - 1) * size : power * size], "little")

        shares = split_secret(seed, list(points.values()), request.threshold, coefficient)
        return {client: shares[point] for client, point in points.items()}

    # ---- opening a sum after a dropout

    def answer(self, request: bytes) -> bytes:
        """Answer a request about a sum that this client uploaded to.

        Raises:
            UnsafeRequest: The answer would reveal more than a sum.
            MalformedMessage: `request` is not a valid request.

        """
        message = decode_either(request, messages.DropoutRequest, messages.UnmaskRequest)
        record = self._records.get(message.request_digest)
        if record is None or not record.row_digest:
            raise UnsafeRequest(f"client {self.client}: it did not upload to this sum")
        self._check_survivors(message.survivors, record)
        if isinstance(message, messages.DropoutRequest):
            return encode(self._pair_seeds(message, record))
        return encode(self._unseal_shares(message, record))

    def _check_survivors(self, requested: tuple[int, ...], record: SumRecord) -> None:
        survivors = set(requested)
        if len(survivors) != len(requested) or self.client not in survivors:
            raise UnsafeRequest(f"client {self.client}: it is not one of the listed survivors")
        if len(survivors) < record.request.threshold:
            raise UnsafeRequest(
                f"client {self.client}: {len(survivors)} survivors are fewer than the threshold "
                f"{record.request.threshold}"
            )
        if not survivors <= record.survivors:
            raise UnsafeRequest(f"client {self.client}: a client that dropped out is listed again")

    def _pair_seeds(
        self, message: messages.DropoutRequest, record: SumRecord
    ) -> messages.PairSeeds:
        if record.unmasked not in (None, tuple(sorted(message.survivors))):
            raise UnsafeRequest(
                f"client {self.client}: the survivors were final when it gave its shares"
            )
        record.survivors = set(message.survivors)
        pairs = self.pair_secrets(record.request)
        seeds = {p: pair.seed for p, pair in pairs.items() if p not in record.survivors}
        return messages.PairSeeds(self.client, message.request_digest, seeds)

    def _unseal_shares(
        self, message: messages.UnmaskRequest, record: SumRecord
    ) -> messages.SeedShares:
        survivors = tuple(sorted(message.survivors))
        if record.unmasked not in (None, survivors) or set(survivors) != record.survivors:
            raise UnsafeRequest(
                f"client {self.client}: the final survivors differ from those of its last answer"
            )
        pairs, request = self.pair_secrets(record.request), record.request
        sealed = message.sealed_shares
        if set(sealed) != set(survivors) - {self.client}:
            raise MalformedMessage(f"client {self.client}: not one share of each other survivor")
        shares = {peer: unseal(pairs[peer].receive_key, text) for peer, text in sealed.items()}
        shares[self.client] = self._seed_shares(request, self.self_seed(request))[self.client]
        record.unmasked = survivors
        return messages.SeedShares(self.client, message.request_digest, shares)


def _decline_reason(row: Row, request: SumRequest) -> str:
    """Return why a row cannot be sent. It leaves the client in the clear, so it has no value."""
    if not np.isfinite(row).all():
        return NOT_FINITE
    return (
        f"a weighted value is above the limit {request.fixed_point.limit:.3g} of privacy.bits and "
        "privacy.precision"
    )


# ---- The clients of secure sums in a simulation, which protects nobody


@dataclass
class SimulatedSecAggClients:
    """All clients of secure sums in this process; their keys derive from the run's seed."""

    rng: Rng
    """Draws of the run."""
    _task: int = -1
    _clients: dict[int, SecAggClient] = field(default_factory=dict)
    _sum_request: bytes = b""

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """Return the public keys of these clients, made when a client first joins in a task."""
        if task != self._task:
            self._task, self._clients = task, {}
        for client in clients:
            if client not in self._clients:
                master = self.rng.numpy_generator("secagg", task, client).bytes(KEY_BYTES)
                self._clients[client] = SecAggClient(TaskKeys(client, master))
        return {client: self._clients[client].keys.public for client in clients}

    def announce(self, sum_request: bytes) -> None:
        """Set the request of the next uploads, and forget the sums of earlier rounds."""
        self._sum_request = sum_request
        position = decode(sum_request, SumRequest).session.position
        for client in self._clients.values():
            client.forget_before(position)

    def upload(self, client: int, fields: Upload, weight: float) -> bytes:
        """Return a client's masked upload."""
        return self._clients[client].upload(self._sum_request, fields, weight)

    def ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        """Return the answers of all clients that are asked."""
        return {client: self._clients[client].answer(data) for client, data in requests.items()}
