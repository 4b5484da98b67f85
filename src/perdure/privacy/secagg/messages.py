"""The messages of a secure sum with their bounds, as bytes and back, and its errors.

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
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from perdure.core import trees as encoding
from perdure.core.received import (
    Bound,
    Flag,
    Integer,
    Items,
    Number,
    Octets,
    Optional,
    Sentence,
    Table,
    Text,
    bad,
    read_message,
)
from perdure.privacy.secagg.layout import (
    COMMIT_BYTES,
    DIGEST_BYTES,
    KEY_BYTES,
    LARGEST,
    MOST_CLIENTS,
    SEALED_BYTES,
    SHARE_BYTES,
    FixedPoint,
    Layout,
    Vector,
)

# ---- What messages hold


class MaskedNumbers(Bound):
    """A vector of int32 or int64, which stands for unsigned numbers."""

    def read(self, key: str, value: Any) -> Vector:
        """Return the unsigned numbers."""
        is_row = isinstance(value, Tensor) and value.dim() == 1
        if not is_row or value.dtype not in (torch.int32, torch.int64):
            raise bad(key, value, "a vector of int32 or int64")
        row: Vector = value.numpy().view(f"<u{value.dtype.itemsize}")
        return row


Client = Annotated[int, Integer(0, LARGEST)]
Clients = Annotated[tuple[int, ...], Items(Integer(0, LARGEST), MOST_CLIENTS)]
Digest = Annotated[bytes, Octets((DIGEST_BYTES,))]
Commitment = Annotated[bytes, Octets((COMMIT_BYTES,))]
_UNIQUE = Items(Integer(0, LARGEST), MOST_CLIENTS, distinct=True)
KeyPerClient = Annotated[Mapping[int, bytes], Table(KEY_BYTES, _UNIQUE)]
CommitmentPerClient = Annotated[Mapping[int, bytes], Table(COMMIT_BYTES, _UNIQUE)]
SealedPerClient = Annotated[Mapping[int, bytes], Table(SEALED_BYTES, _UNIQUE)]
_POSITIVE = Number(sys.float_info.min, sys.float_info.max)
SharePerClient = Annotated[Mapping[int, bytes], Table(SHARE_BYTES, _UNIQUE)]


class MalformedMessage(ValueError):
    """A message that is damaged, of another round, or not expected at this point."""


class UnsafeRequest(ValueError):
    """A request that a client refuses, because its answer would reveal more than a sum."""


class BelowThreshold(RuntimeError):
    """Fewer clients are left than the threshold: the sum cannot be opened."""


@dataclass(frozen=True)
class Session:
    """The position of a sum in a run."""

    task: Annotated[int, Integer(0, LARGEST)]
    """Index of the task."""
    round: Annotated[int, Integer(0, LARGEST)]
    """Index of the round within the task."""
    exchange: Annotated[int, Integer(-LARGEST, LARGEST)] = 0
    """Position within the task, as `Context.exchange`: negative before training."""
    attempt: Annotated[int, Integer(0, LARGEST)] = 0
    """Number of earlier attempts at this sum."""
    nonce: Annotated[str, Text(64)] = ""
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
    public_keys: KeyPerClient
    """Public keys of all clients of the sum."""
    threshold: Annotated[int, Integer(1, LARGEST)]
    """Clients that must be left for the sum to be opened."""
    fixed_point: FixedPoint
    """Format of the numbers."""
    single_message: Annotated[bool, Flag()] = True
    """Whether uploads carry the pads that open the sum if no client drops out."""
    weight_cap: Annotated[float | None, Optional(_POSITIVE)] = None
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
    client: Client
    """Index of the sender."""
    request_digest: Digest
    """`SumRequest.digest` of the sum."""
    layout: Layout
    """Meaning of the numbers in `row`."""
    row: Annotated[Vector, MaskedNumbers()]
    """Fixed-point numbers plus masks: uint [layout.size]."""
    self_commitment: Commitment
    """Commitment to the self-mask's seed."""
    sealed_shares: SealedPerClient
    """For each peer, a share of the self-mask's seed that only the peer can decrypt."""
    pair_commitments: CommitmentPerClient
    """For each peer, a commitment to the seed of the common mask."""
    padded_seed: Annotated[bytes, Octets((0, KEY_BYTES))]
    """The self-mask's seed under the pads of all peers; empty unless `single_message` is on."""
    pads: KeyPerClient
    """For each peer, the pad that covers the peer's self-mask; empty unless `single_message`."""


@dataclass(frozen=True)
class Declined:
    """A client that does not upload; for the others it dropped out."""

    kind: ClassVar[str] = "declined"
    client: Client
    """Index of the sender."""
    request_digest: Digest
    """`SumRequest.digest` of the sum."""
    reason: Annotated[str, Sentence(10_000)]
    """Why its values cannot be sent."""


@dataclass(frozen=True)
class DropoutRequest:
    """Asks for the seeds of masks shared with clients that dropped out."""

    kind: ClassVar[str] = "dropout_request"
    request_digest: Digest
    """`SumRequest.digest` of the sum."""
    survivors: Clients
    """The clients that are left."""


@dataclass(frozen=True)
class PairSeeds:
    """The seeds of one client's masks shared with the clients that dropped out."""

    kind: ClassVar[str] = "pair_seeds"
    client: Client
    """Index of the sender."""
    request_digest: Digest
    """`SumRequest.digest` of the sum."""
    seeds: KeyPerClient
    """One seed per client that dropped out."""


@dataclass(frozen=True)
class UnmaskRequest:
    """Asks for the shares of the survivors' self-masks."""

    kind: ClassVar[str] = "unmask_request"
    request_digest: Digest
    """`SumRequest.digest` of the sum."""
    survivors: Clients
    """The clients whose rows are in the sum; final."""
    sealed_shares: SealedPerClient
    """For each survivor, the share that it encrypted for the receiver."""


@dataclass(frozen=True)
class SeedShares:
    """One client's shares of the seeds of the survivors' self-masks."""

    kind: ClassVar[str] = "seed_shares"
    client: Client
    """Index of the sender."""
    request_digest: Digest
    """`SumRequest.digest` of the sum."""
    shares: SharePerClient
    """One share per survivor."""


Message = (
    SumRequest | MaskedRow | Declined | DropoutRequest | PairSeeds | UnmaskRequest | SeedShares
)
"""Any message of the protocol."""

# ---- Messages as bytes: a checksum and an encoded tree, read with checks

_CHECKSUM_BYTES = 16
MessageType = TypeVar("MessageType", bound=Message)
OtherType = TypeVar("OtherType", bound=Message)


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    tree = {field.name: _to_tree(getattr(message, field.name)) for field in fields(message)}
    body = encoding.encode({"kind": message.kind, **tree})
    return _checksum(body) + body


def decode(data: bytes, message_type: type[MessageType]) -> MessageType:
    """Read a message of this type.

    Raises:
        MalformedMessage: The bytes are damaged, or not a message of this type.

    """
    message: MessageType = _decode(data, (message_type,))
    return message


def decode_either(
    data: bytes, first: type[MessageType], second: type[OtherType]
) -> MessageType | OtherType:
    """Read a message of one of two types.

    Raises:
        MalformedMessage: The bytes are damaged, or not a message of either type.

    """
    message: MessageType | OtherType = _decode(data, (first, second))
    return message


def _decode(data: bytes, message_types: tuple[Any, ...]) -> Any:
    checksum, body = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    if len(data) < _CHECKSUM_BYTES or _checksum(body) != checksum:
        raise MalformedMessage("the message was damaged in transit")
    try:
        return _message(encoding.decode_message(body), message_types)
    except MalformedMessage:
        raise
    except ValueError as error:
        raise MalformedMessage(str(error)) from None


def _message(tree: dict[str, Any], message_types: tuple[Any, ...]) -> Any:
    kind = tree.pop("kind", None)
    message_type = next((cls for cls in message_types if cls.kind == kind), None)
    if message_type is None:
        expected = " or ".join(cls.kind for cls in message_types)
        raise bad("kind", kind, expected)
    return read_message(message_type, message_type.kind, tree)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]


def _to_tree(value: Any) -> Any:
    """Return the value of an attribute as part of a tree."""
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else ""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.view(f"<i{value.dtype.itemsize}"))
    if isinstance(value, dict):
        return {"clients": list(value), "rows": _to_tree(b"".join(value.values()))}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
