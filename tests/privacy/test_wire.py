"""The messages of a secure sum: encoded and decoded, and forms that no honest sender makes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from perdure.core import trees as encoding
from perdure.privacy.secagg.layout import SEALED_BYTES, FixedPoint, Layout, Slot
from perdure.privacy.secagg.messages import (
    Declined,
    DropoutRequest,
    MalformedMessage,
    MaskedRow,
    PairSeeds,
    SeedShares,
    Session,
    SumRequest,
    UnmaskRequest,
    decode,
    decode_either,
    encode,
)

KEYS = {3: b"k" * 32, 40: b"j" * 32}
LAYOUT = Layout(("u", "v"), (Slot("u", "a.b/c", (2, 3), "float32"), Slot("v", "n", (), "int64")))
MESSAGES: list[Any] = [
    SumRequest(Session(1, 2, 3, 4, "n"), KEYS, 2, FixedPoint(32, 5, 9), single_message=False),
    SumRequest(Session(1, 0, -2, 0, "n"), KEYS, 2, FixedPoint(64, 5, 9)),
    MaskedRow(
        client=3, request_digest=b"c" * 32, layout=LAYOUT, row=np.arange(9, dtype=np.uint64) - 4,
        self_commitment=b"s" * 16, sealed_shares={40: b"x" * SEALED_BYTES},
        pair_commitments={40: b"y" * 16}, padded_seed=b"z" * 32, pads={40: b"w" * 32},
    ),
    Declined(3, b"c" * 32, "not finite"),
    DropoutRequest(b"c" * 32, (3, 40)),
    PairSeeds(3, b"c" * 32, {}),
    UnmaskRequest(b"c" * 32, (3, 40), {40: b"x" * SEALED_BYTES}),
    SeedShares(3, b"c" * 32, {3: b"a" * 33, 40: b"b" * 33}),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_message_survives_encoding_and_decoding(message: Any) -> None:
    again = decode(encode(message), type(message))
    for name, value in vars(message).items():
        np.testing.assert_equal(getattr(again, name), value)
    assert encode(again) == encode(message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_a_message_of_another_kind_is_refused(message: Any) -> None:
    other = PairSeeds if message.kind == "seed_shares" else SeedShares
    with pytest.raises(MalformedMessage, match=f"kind: must be {other.kind}, got '{message.kind}'"):
        decode(encode(message), other)
    assert decode_either(encode(message), other, type(message)).kind == message.kind


def forged(message: Any, **values: Any) -> bytes:
    """Return a message with other values and a valid checksum."""
    tree = encoding.decode(encode(message)[16:])
    body = encoding.encode({**tree, **values})
    return hashlib.sha256(body).digest()[:16] + body


def octets(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


@pytest.mark.parametrize(
    "shares",
    [
        {"clients": [3, 40], "rows": octets(65)},
        {"clients": [3, 40], "rows": octets(99)},
        {"clients": [3, 3], "rows": octets(66)},
        {"clients": [-1], "rows": octets(33)},
        {"clients": [True], "rows": octets(33)},
        {"clients": ["3"], "rows": octets(33)},
        {"clients": [3]},
        {"clients": [3], "rows": "text"},
        [1, 2],
        None,
    ],
    ids=str,
)
def test_a_malformed_table_is_refused(shares: Any) -> None:
    with pytest.raises(MalformedMessage):
        decode(forged(MESSAGES[-1], shares=shares), SeedShares)


@pytest.mark.parametrize(
    "values",
    [
        {"row": torch.zeros(9)},
        {"row": torch.zeros(3, 3, dtype=torch.int64)},
        {"row": [1, 2]},
        {"client": -3},
        {"client": 1.5},
        {"layout": {"fields": ["u"]}},
        {"layout": {"fields": ["u"], "slots": [{"field": "u"}]}},
        {"layout": {"fields": ["u"], "slots": [vars(LAYOUT.slots[0]) | {"dtype": "load"}]}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_malformed_row_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        decode(forged(MESSAGES[2], **values), MaskedRow)


@pytest.mark.parametrize(
    "values", [{"fixed_point": {"bits": 8}}, {"session": {"day": 1}}, {"threshold": "2"}], ids=str
)
def test_a_malformed_request_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        decode(forged(MESSAGES[0], **values), SumRequest)
