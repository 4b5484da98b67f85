"""Messages of secure sums as bytes: a checksum and an encoded tree, read with checks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from perdure.core import encoding
from perdure.privacy.secagg.fixed_point import FixedPoint, Vector
from perdure.privacy.secagg.keys import COMMIT_BYTES, KEY_BYTES, TAG_BYTES
from perdure.privacy.secagg.layout import Layout, Slot
from perdure.privacy.secagg.messages import MalformedMessage, Message, Session
from perdure.privacy.secagg.shamir import SHARE_BYTES

SEALED_BYTES = SHARE_BYTES + TAG_BYTES
"""Size of an encrypted share."""
_CHECKSUM_BYTES = 16
_WIRE_NAMES = {
    "public_keys": "keys",
    "fixed_point": "grid",
    "single_message": "at_once",
    "request_digest": "context",
    "self_commitment": "commit",
    "pair_commitments": "commits",
    "sealed_shares": "sealed",
    "padded_seed": "covered",
    "survivors": "members",
}
"""Keys of the encoded tree that differ from the attribute's name."""
_ATTRIBUTES = {wire_name: name for name, wire_name in _WIRE_NAMES.items()}
_ENTRY_BYTES = {
    "keys": KEY_BYTES,
    "commits": COMMIT_BYTES,
    "sealed": SEALED_BYTES,
    "pads": KEY_BYTES,
    "seeds": KEY_BYTES,
    "shares": SHARE_BYTES,
}
"""Size of one client's entry, by the key of the mapping."""
MessageType = TypeVar("MessageType", bound=Message)
OtherType = TypeVar("OtherType", bound=Message)


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    tree = {
        _WIRE_NAMES.get(field.name, field.name): _to_tree(getattr(message, field.name))
        for field in fields(message)
        if getattr(message, field.name) is not None
    }
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
        tree = encoding.decode(body)
        kind = tree.pop("kind")
        message_type = next((cls for cls in message_types if cls.kind == kind), None)
        if message_type is None:
            expected = " or ".join(cls.kind for cls in message_types)
            raise MalformedMessage(f"kind: must be {expected}, got {kind!r}")
        return message_type(
            **{_ATTRIBUTES.get(key, key): _read(key, value) for key, value in tree.items()}
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise MalformedMessage(str(error)) from None


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]


def _to_tree(value: Any) -> Any:
    """Return the value of an attribute as part of a tree."""
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else ""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.view(f"<i{value.dtype.itemsize}"))
    if isinstance(value, dict):
        return {"of": list(value), "rows": _to_tree(b"".join(value.values()))}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _read(key: str, value: Any) -> Any:
    """Read one value of a tree; the inverse of `_to_tree`."""
    if key in _ENTRY_BYTES:
        return _per_client(value, _ENTRY_BYTES[key])
    reader = _READERS.get(key)
    if reader is None:
        raise MalformedMessage(f"unknown key {key!r}")
    return reader(value)


def _per_client(value: Any, size: int) -> dict[int, bytes]:
    entries, clients = _bytes(value["rows"]), [_integer(client) for client in value["of"]]
    if len(entries) != size * len(clients) or len(set(clients)) != len(clients):
        raise MalformedMessage("a table does not have one row per client")
    return {client: entries[k * size : (k + 1) * size] for k, client in enumerate(clients)}


def _bytes(value: Any) -> bytes:
    return b"" if value == "" else bytes(value.numpy().tobytes())


def _row(value: Any) -> Vector:
    size = value.dtype.itemsize
    if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
        raise MalformedMessage("row: must be a vector of int32 or int64")
    row: Vector = value.numpy().view(f"<u{size}")
    return row


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise MalformedMessage(f"must be an integer of at least 0, got {value!r}")
    return value


def _cap(value: Any) -> float:
    if type(value) is not float or not 0 < value < math.inf:
        raise MalformedMessage(f"weight_cap: must be a finite number above 0, got {value!r}")
    return value


def _dtype(value: Any) -> str:
    if not isinstance(getattr(torch, str(value), None), torch.dtype):
        raise MalformedMessage(f"dtype: must be a torch dtype, got {value!r}")
    return str(value)


def _layout(value: Any) -> Layout:
    slots = [
        Slot(str(s["field"]), str(s["key"]), tuple(map(_integer, s["shape"])), _dtype(s["dtype"]))
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
    "members": lambda value: tuple(map(_integer, value)),
    "client": _integer,
    "threshold": _integer,
    "at_once": bool,
    "weight_cap": _cap,
    "reason": str,
}
"""Readers of the other keys."""
