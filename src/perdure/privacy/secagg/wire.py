"""The messages of a secure sum as plain dataclasses, and as bytes: a checksum and one saved tree.

server -> client  Call           who takes part, with their public keys; the grid; the threshold
client -> server  Masked         the masked row, shares of the self-mask for the peers, pads
Declined       instead of it: the client's values cannot be sent, and why
only where somebody dropped out (or where `at_once` is off):
server -> client  SettleRequest  who is left
client -> server  Seeds          the seeds of the masks shared with those who are gone
server -> client  OpenRequest    the final set, and the shares that its members sent this client
client -> server  Shares         these shares, opened
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch

from perdure.core import encoding
from perdure.privacy.secagg.errors import MalformedMessage
from perdure.privacy.secagg.fixed_point import FixedPoint, Vector
from perdure.privacy.secagg.keys import COMMIT_BYTES, KEY_BYTES, TAG_BYTES
from perdure.privacy.secagg.layout import Layout, Slot
from perdure.privacy.secagg.shamir import SHARE_BYTES

Table = Mapping[int, bytes]
"""Something of equal size for each client."""
_CHECK_BYTES = 16
SEALED_BYTES = SHARE_BYTES + TAG_BYTES


@dataclass(frozen=True)
class Session:
    """Which sum of a run this is. `nonce` makes it unique beyond restarts of the server."""

    task: int
    round: int
    exchange: int = 0
    """Position within the task, as Context.exchange: negative before training."""
    attempt: int = 0
    nonce: str = ""


@dataclass(frozen=True)
class SumRequest:
    """The server's call for one sum."""

    kind: ClassVar[str] = "call"
    session: Session
    keys: Table
    """Public keys of all who take part."""
    threshold: int
    """Clients that must be left for the sum to be opened."""
    grid: FixedPoint
    at_once: bool = True
    """Uploads carry the pads that open the sum when nobody drops out."""

    @property
    def clients(self) -> list[int]:
        """Who takes part, in the order of their number."""
        return sorted(self.keys)

    @cached_property
    def context(self) -> bytes:
        """A digest of the whole call: masks of two calls that differ in anything are unrelated."""
        return hashlib.sha256(encode(self)).digest()

    def points(self) -> dict[int, int]:
        """Each client's point in the sharing of secrets, counted from 1."""
        return {client: place + 1 for place, client in enumerate(self.clients)}


@dataclass(frozen=True)
class Masked:
    """A client's upload."""

    kind: ClassVar[str] = "masked"
    client: int
    context: bytes
    layout: Layout
    row: Vector
    commit: bytes
    """Of the self-mask's seed."""
    sealed: Table
    """For each peer a share of the self-mask's seed that only the peer can read."""
    commits: Table
    """For each peer, of the seed of the common mask."""
    covered: bytes
    """The self-mask's seed under the pads of all peers; empty unless the call is at_once."""
    pads: Table
    """For each peer, the pad that covers its self-mask."""


@dataclass(frozen=True)
class Declined:
    """A client that takes no part after all; to the others it has dropped out."""

    kind: ClassVar[str] = "declined"
    client: int
    context: bytes
    reason: str


@dataclass(frozen=True)
class DropoutRequest:
    """Who is left: their masks shared with all others must go."""

    kind: ClassVar[str] = "settle"
    context: bytes
    members: tuple[int, ...]


@dataclass(frozen=True)
class Seeds:
    """The seeds of one member's masks shared with those who are gone."""

    kind: ClassVar[str] = "seeds"
    client: int
    context: bytes
    seeds: Table


@dataclass(frozen=True)
class UnmaskRequest:
    """The final set, with what its members sealed for the receiver."""

    kind: ClassVar[str] = "open"
    context: bytes
    members: tuple[int, ...]
    sealed: Table


@dataclass(frozen=True)
class Shares:
    """Shares of the members' self-masks."""

    kind: ClassVar[str] = "shares"
    client: int
    context: bytes
    shares: Table


Message = SumRequest | Masked | Declined | DropoutRequest | Seeds | UnmaskRequest | Shares
Kind = TypeVar("Kind", bound=Message)
Other = TypeVar("Other", bound=Message)
_TABLES = {
    "keys": KEY_BYTES,
    "commits": COMMIT_BYTES,
    "sealed": SEALED_BYTES,
    "pads": KEY_BYTES,
    "seeds": KEY_BYTES,
    "shares": SHARE_BYTES,
}
"""Bytes that each client has in a table."""


def encode(message: Message) -> bytes:
    """A message as it travels."""
    tree = {field.name: _write(getattr(message, field.name)) for field in fields(message)}
    body = encoding.encode({"kind": message.kind, **tree})
    return _checksum(body) + body


def decode(data: bytes, kind: type[Kind]) -> Kind:
    """A message of this kind; Garbled if it is none."""
    found: Kind = _decode(data, (kind,))
    return found


def decode_either(data: bytes, one: type[Kind], other: type[Other]) -> Kind | Other:
    """A message of one of two kinds; Garbled if it is neither."""
    found: Kind | Other = _decode(data, (one, other))
    return found


def _decode(data: bytes, kinds: tuple[Any, ...]) -> Any:
    if len(data) < _CHECK_BYTES or _checksum(data[_CHECK_BYTES:]) != data[:_CHECK_BYTES]:
        raise MalformedMessage("a message was damaged on its way")
    try:
        tree = encoding.decode(data[_CHECK_BYTES:])
        named = tree.pop("kind")
        kind = next((each for each in kinds if each.kind == named), None)
        if kind is None:
            expected = " or ".join(each.kind for each in kinds)
            raise MalformedMessage(f"a message is of kind {named!r}, expected: {expected}")
        return kind(**{name: _read(name, value) for name, value in tree.items()})
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise MalformedMessage(str(error)) from None


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECK_BYTES]


def _write(value: Any) -> Any:
    """A part of a message as a part of a tree."""
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else ""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.view(f"<i{value.dtype.itemsize}"))
    if isinstance(value, dict):
        rows = bytearray(b"".join(value.values()))
        return {"of": list(value), "rows": _write(bytes(rows))}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _read(name: str, value: Any) -> Any:
    """The inverse of _write for one part of a message."""
    if name in _TABLES:
        return _table(value, _TABLES[name])
    reader = _READERS.get(name)
    if reader is None:
        raise MalformedMessage(f"a message has a part {name!r}")
    return reader(value)


def _table(value: Any, size: int) -> dict[int, bytes]:
    rows, of = _bytes(value["rows"]), [_whole(client) for client in value["of"]]
    if len(rows) != size * len(of) or len(set(of)) != len(of):
        raise MalformedMessage("a table does not have one row a client")
    return {client: rows[k * size : (k + 1) * size] for k, client in enumerate(of)}


def _bytes(value: Any) -> bytes:
    return b"" if value == "" else bytes(value.numpy().tobytes())


def _row(value: Any) -> Vector:
    size = value.dtype.itemsize
    if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        raise MalformedMessage("a row has the wrong type")
    row: Vector = value.numpy().view(f"<u{size}")
    return row


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise MalformedMessage(f"{value!r} stands where a number should")
    return value


def _dtype(value: Any) -> str:
    if not isinstance(getattr(torch, str(value), None), torch.dtype):
        raise MalformedMessage(f"{value!r} is no type of numbers")
    return str(value)


def _layout(value: Any) -> Layout:
    slots = [
        Slot(str(s["field"]), str(s["key"]), tuple(map(_whole, s["shape"])), _dtype(s["dtype"]))
        for s in value["slots"]
    ]
    return Layout(tuple(map(str, value["fields"])), tuple(slots))


_READERS: dict[str, Callable[[Any], Any]] = {
    "session": lambda value: Session(**value),
    "grid": lambda value: FixedPoint(**value),
    "layout": _layout,
    "row": _row,
    "context": _bytes,
    "commit": _bytes,
    "covered": _bytes,
    "members": lambda value: tuple(map(_whole, value)),
    "client": _whole,
    "threshold": _whole,
    "at_once": bool,
    "reason": str,
}
