"""The messages of a secure sum, and its errors.

    server -> client  SumRequest      the clients with their public keys, the number format, the
                                      threshold
    client -> server  MaskedRow       the masked row, shares of the self-mask's seed for the peers,
                                      pads; or
                      Declined        why the client's values cannot be sent

only if a client dropped out, or if `single_message` is off:

    server -> client  DropoutRequest  the clients that are left
    client -> server  PairSeeds       the seeds of the masks shared with clients that dropped out
    server -> client  UnmaskRequest   the final survivors, and the shares that they sent this client
    client -> server  SeedShares      these shares, decrypted
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from perdure.privacy.secagg.layout import FixedPoint, Layout, Vector

PerClient = Mapping[int, bytes]
"""Bytes of equal length for each of several clients."""


class MalformedMessage(ValueError):
    """A message that is damaged, of another round, or not expected at this point."""


class UnsafeRequest(ValueError):
    """A request that a client refuses, because its answer would reveal more than a sum."""


class BelowThreshold(RuntimeError):
    """Fewer clients are left than the threshold: the sum cannot be opened."""


@dataclass(frozen=True)
class Session:
    """The position of a sum in a run."""

    task: int
    """Index of the task."""
    round: int
    """Index of the round within the task."""
    exchange: int = 0
    """Position within the task, as `Context.exchange`: negative before training."""
    attempt: int = 0
    """Number of earlier attempts at this sum."""
    nonce: str = ""
    """Makes the session unique even if the server is restarted."""

    @property
    def position(self) -> tuple[int, int, int]:
        """The round or exchange, of which a client takes part in one sum alone."""
        return self.task, self.round, self.exchange


@dataclass(frozen=True)
class SumRequest:
    """The server's request for one sum."""

    kind: ClassVar[str] = "sum_request"
    session: Session
    """The position of the sum in the run."""
    public_keys: PerClient
    """Public keys of all clients of the sum."""
    threshold: int
    """Clients that must be left for the sum to be opened."""
    fixed_point: FixedPoint
    """Format of the numbers."""
    single_message: bool = True
    """Whether uploads carry the pads that open the sum if no client drops out."""
    weight_cap: float | None = None
    """Number of examples beyond which a client's do not count in its weight. It is the same for
    all, since masks of different requests do not cancel: a server cannot single out a client by
    leaving the others no weight. If None, there is no cap."""

    @property
    def clients(self) -> list[int]:
        """The clients of the sum, in ascending order."""
        return sorted(self.public_keys)

    @cached_property
    def digest(self) -> bytes:
        """A digest of the whole request: masks of two different requests are unrelated."""
        from perdure.privacy.secagg.wire import encode

        return hashlib.sha256(encode(self)).digest()

    def points(self) -> dict[int, int]:
        """Return each client's point in the secret sharing, from 1."""
        return {client: index + 1 for index, client in enumerate(self.clients)}


@dataclass(frozen=True)
class Survivors:
    """The clients that are left in a sum, as the server has sent it to them."""

    clients: tuple[int, ...]
    """Their indices, in ascending order."""
    final: bool
    """Whether the sum was opened for them, so that no further one may drop out."""


@dataclass(frozen=True)
class MaskedRow:
    """A client's upload under masks."""

    kind: ClassVar[str] = "masked_row"
    client: int
    """Index of the sender."""
    request_digest: bytes
    """`SumRequest.digest` of the sum."""
    layout: Layout
    """Meaning of the numbers in `row`."""
    row: Vector
    """Fixed-point numbers plus masks: uint [layout.size]."""
    self_commitment: bytes
    """Commitment to the self-mask's seed."""
    sealed_shares: PerClient
    """For each peer, a share of the self-mask's seed that only the peer can decrypt."""
    pair_commitments: PerClient
    """For each peer, a commitment to the seed of the common mask."""
    padded_seed: bytes
    """The self-mask's seed under the pads of all peers; empty unless `single_message` is on."""
    pads: PerClient
    """For each peer, the pad that covers the peer's self-mask; empty unless `single_message`."""


@dataclass(frozen=True)
class Declined:
    """A client that does not upload; for the others it dropped out."""

    kind: ClassVar[str] = "declined"
    client: int
    """Index of the sender."""
    request_digest: bytes
    """`SumRequest.digest` of the sum."""
    reason: str
    """Why its values cannot be sent."""


@dataclass(frozen=True)
class DropoutRequest:
    """Asks for the seeds of masks shared with clients that dropped out."""

    kind: ClassVar[str] = "dropout_request"
    request_digest: bytes
    """`SumRequest.digest` of the sum."""
    survivors: tuple[int, ...]
    """The clients that are left."""


@dataclass(frozen=True)
class PairSeeds:
    """The seeds of one client's masks shared with the clients that dropped out."""

    kind: ClassVar[str] = "pair_seeds"
    client: int
    """Index of the sender."""
    request_digest: bytes
    """`SumRequest.digest` of the sum."""
    seeds: PerClient
    """One seed per client that dropped out."""


@dataclass(frozen=True)
class UnmaskRequest:
    """Asks for the shares of the survivors' self-masks."""

    kind: ClassVar[str] = "unmask_request"
    request_digest: bytes
    """`SumRequest.digest` of the sum."""
    survivors: tuple[int, ...]
    """The clients whose rows are in the sum; final."""
    sealed_shares: PerClient
    """For each survivor, the share that it encrypted for the receiver."""


@dataclass(frozen=True)
class SeedShares:
    """One client's shares of the seeds of the survivors' self-masks."""

    kind: ClassVar[str] = "seed_shares"
    client: int
    """Index of the sender."""
    request_digest: bytes
    """`SumRequest.digest` of the sum."""
    shares: PerClient
    """One share per survivor."""


Message = (
    SumRequest | MaskedRow | Declined | DropoutRequest | PairSeeds | UnmaskRequest | SeedShares
)
"""Any message of the protocol."""
