"""Messages of secure sums as bytes: a checksum and an encoded tree, read with checks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from perdure.core import trees as encoding
from perdure.core.received import (
    REAL_DTYPES,
    bad,
    one_line,
    read_distinct,
    read_integer,
    read_list,
    read_mapping,
    read_number,
    read_shape,
    read_text,
)
from perdure.core.trees import Tree
from perdure.privacy.secagg.layout import (
    COMMIT_BYTES,
    KEY_BYTES,
    TAG_BYTES,
    FixedPoint,
    Layout,
    Slot,
    Vector,
)
from perdure.privacy.secagg.messages import MalformedMessage, Message, Session
from perdure.privacy.secagg.shamir import SHARE_BYTES

SEALED_BYTES = SHARE_BYTES + TAG_BYTES
"""Size of an encrypted share."""
DIGEST_BYTES = 32
"""Size of the digest of a request."""
_CHECKSUM_BYTES = 16
_LARGEST_NUMBER = 1_000_000_000
"""Upper bound on indices and counts."""
_MOST_CLIENTS = 1_000_000
_MOST = 100_000
"""Upper bound on the fields and tensors of an upload."""
_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in REAL_DTYPES)
_ENTRY_BYTES = {
    "public_keys": KEY_BYTES,
    "pair_commitments": COMMIT_BYTES,
    "sealed_shares": SEALED_BYTES,
    "pads": KEY_BYTES,
    "seeds": KEY_BYTES,
    "shares": SHARE_BYTES,
}
"""Size of one client's entry, by the key of the mapping."""
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


def _message(tree: Tree, message_types: tuple[Any, ...]) -> Any:
    kind = tree.pop("kind", None)
    message_type = next((cls for cls in message_types if cls.kind == kind), None)
    if message_type is None:
        expected = " or ".join(cls.kind for cls in message_types)
        raise bad("kind", kind, expected)
    read_mapping(message_type.kind, tree, (field.name for field in fields(message_type)))
    return message_type(**{key: _read(key, value) for key, value in tree.items()})


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


def _read(key: str, value: Any) -> Any:
    """Read one value of a tree; the inverse of `_to_tree`."""
    if key in _ENTRY_BYTES:
        return _per_client(key, value, _ENTRY_BYTES[key])
    return _READERS[key](value)


def _per_client(key: str, value: Any, size: int) -> dict[int, bytes]:
    entries = read_mapping(key, value, ("clients", "rows"))
    clients = [
        _client(client) for client in read_list("clients", entries["clients"], _MOST_CLIENTS)
    ]
    read_distinct("clients", clients)
    rows = _bytes(entries["rows"])
    if len(rows) != size * len(clients):
        raise MalformedMessage("a table does not have one row per client")
    return {client: rows[k * size : (k + 1) * size] for k, client in enumerate(clients)}


def _bytes(value: Any) -> bytes:
    if isinstance(value, str) and not value:
        return b""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        raise bad("bytes", value, "a vector of uint8")
    return value.numpy().tobytes()


def _exactly(key: str, *sizes: int) -> Callable[[Any], bytes]:
    """Return a reader of bytes of one of these sizes."""

    def read(value: Any) -> bytes:
        data = _bytes(value)
        if len(data) not in sizes:
            raise bad(key, len(data), f"of {' or '.join(map(str, sizes))} bytes")
        return data

    return read


def _row(value: Any) -> Vector:
    is_row = isinstance(value, Tensor) and value.dim() == 1
    if not is_row or value.dtype not in (torch.int32, torch.int64):
        raise bad("row", value, "a vector of int32 or int64")
    row: Vector = value.numpy().view(f"<u{value.dtype.itemsize}")
    return row


def _client(value: Any) -> int:
    return read_integer("client", value, 0, _LARGEST_NUMBER)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise bad("single_message", value, "true or false")
    return value


def _session(value: Any) -> Session:
    entries = read_mapping("session", value, (field.name for field in fields(Session)))
    task, round_, attempt = (
        read_integer(key, entries[key], 0, _LARGEST_NUMBER) for key in ("task", "round", "attempt")
    )
    exchange = read_integer("exchange", entries["exchange"], -_LARGEST_NUMBER, _LARGEST_NUMBER)
    return Session(task, round_, exchange, attempt, read_text("nonce", entries["nonce"], 64))


def _fixed_point(value: Any) -> FixedPoint:
    entries = read_mapping("fixed_point", value, (field.name for field in fields(FixedPoint)))
    return FixedPoint(
        read_integer("bits", entries["bits"], 32, 64),
        read_integer("precision", entries["precision"], 0, 63),
        read_integer("clients", entries["clients"], 1, _LARGEST_NUMBER),
    )


def _cap(value: Any) -> float | None:
    return (
        None
        if value is None
        else read_number("weight_cap", value, sys.float_info.min, sys.float_info.max)
    )


def _layout(value: Any) -> Layout:
    entries = read_mapping("layout", value, ("fields", "slots"))
    names = [read_text("field", name) for name in read_list("fields", entries["fields"], _MOST)]
    slots = [_slot(slot, names) for slot in read_list("slots", entries["slots"], _MOST)]
    read_distinct("fields", names)
    read_distinct("slots", [(slot.field, slot.key) for slot in slots])
    return Layout(tuple(names), tuple(slots))


def _slot(value: Any, names: list[str]) -> Slot:
    entries = read_mapping("slot", value, (field.name for field in fields(Slot)))
    field_name, dtype = read_text("field", entries["field"]), read_text("dtype", entries["dtype"])
    if field_name not in names:
        raise bad("field", field_name, "one of the layout's fields")
    if dtype not in _DTYPES:
        raise bad("dtype", dtype, f"one of {', '.join(_DTYPES)}")
    shape = read_shape("shape", entries["shape"])
    return Slot(field_name, read_text("key", entries["key"]), shape, dtype)


_READERS: dict[str, Callable[[Any], Any]] = {
    "session": _session,
    "fixed_point": _fixed_point,
    "layout": _layout,
    "row": _row,
    "request_digest": _exactly("request_digest", DIGEST_BYTES),
    "self_commitment": _exactly("self_commitment", COMMIT_BYTES),
    "padded_seed": _exactly("padded_seed", 0, KEY_BYTES),
    "survivors": lambda value: tuple(map(_client, read_list("survivors", value, _MOST_CLIENTS))),
    "client": _client,
    "threshold": lambda value: read_integer("threshold", value, 1, _LARGEST_NUMBER),
    "single_message": _flag,
    "weight_cap": _cap,
    "reason": lambda value: one_line(read_text("reason", value, 10_000)),
}
"""Readers of the other keys."""
