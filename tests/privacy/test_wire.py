"""The messages of a secure sum: there and back, and forms that no honest sender makes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

from perdure.core import encoding
from perdure.privacy.secagg.errors import MalformedMessage
from perdure.privacy.secagg.fixed_point import FixedPoint
from perdure.privacy.secagg.layout import Layout, Slot
from perdure.privacy.secagg.wire import (
    SEALED_BYTES,
    Declined,
    DropoutRequest,
    Masked,
    Seeds,
    Session,
    Shares,
    SumRequest,
    UnmaskRequest,
    decode,
    decode_either,
    encode,
)

KEYS = {3: b"k" * 32, 40: b"j" * 32}
LAYOUT = Layout(("u", "v"), (Slot("u", "a.b/c", (2, 3), "float32"), Slot("v", "n", (), "int64")))
MESSAGES: list[Any] = [
    SumRequest(Session(1, 2, 3, 4, "n"), KEYS, 2, FixedPoint(32, 5, 9), at_once=False),
    SumRequest(Session(1, 0, -2, 0, "n"), KEYS, 2, FixedPoint(64, 5, 9)),
    Masked(
        client=3, context=b"c" * 32, layout=LAYOUT, row=np.arange(9, dtype=np.uint64) - 4,
        commit=b"s" * 16, sealed={40: b"x" * SEALED_BYTES}, commits={40: b"y" * 16},
        covered=b"z" * 32, pads={40: b"w" * 32},
    ),
    Declined(3, b"c" * 32, "not finite"),
    DropoutRequest(b"c" * 32, (3, 40)),
    Seeds(3, b"c" * 32, {}),
    UnmaskRequest(b"c" * 32, (3, 40), {40: b"x" * SEALED_BYTES}),
    Shares(3, b"c" * 32, {3: b"a" * 33, 40: b"b" * 33}),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_there_and_back(message: Any) -> None:
    again = decode(encode(message), type(message))
    for name, value in vars(message).items():
        np.testing.assert_equal(getattr(again, name), value)
    assert encode(again) == encode(message)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_another_kind_is_refused(message: Any) -> None:
    other = Seeds if message.kind == "shares" else Shares
    with pytest.raises(MalformedMessage, match=f"of kind '{message.kind}', expected: {other.kind}"):
        decode(encode(message), other)
    assert decode_either(encode(message), other, type(message)).kind == message.kind


def forged(message: Any, **parts: Any) -> bytes:
    """A message with other parts and a right checksum."""
    tree = encoding.decode(encode(message)[16:])
    body = encoding.encode({**tree, **parts})
    return hashlib.sha256(body).digest()[:16] + body


def octets(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


@pytest.mark.parametrize(
    "shares",
    [
        {"of": [3, 40], "rows": octets(65)},
        {"of": [3, 40], "rows": octets(99)},
        {"of": [3, 3], "rows": octets(66)},
        {"of": [-1], "rows": octets(33)},
        {"of": [True], "rows": octets(33)},
        {"of": ["3"], "rows": octets(33)},
        {"of": [3]},
        {"of": [3], "rows": "text"},
        [1, 2],
        None,
    ],
    ids=str,
)
def test_tables_that_are_none(shares: Any) -> None:
    with pytest.raises(MalformedMessage):
        decode(forged(MESSAGES[-1], shares=shares), Shares)


@pytest.mark.parametrize(
    "parts",
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
def test_uploads_that_are_none(parts: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        decode(forged(MESSAGES[1], **parts), Masked)


@pytest.mark.parametrize(
    "parts", [{"grid": {"bits": 8}}, {"session": {"day": 1}}, {"threshold": "2"}], ids=str
)
def test_calls_that_are_none(parts: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        decode(forged(MESSAGES[0], **parts), SumRequest)
