"""Small messages that would need much memory, nest deeply, or mean two things: refused, cheaply."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import torch

from perdure.core.received import one_line, read_json
from perdure.core.trees import decode_message, encode
from perdure.federation.messages import BadMessage, NodeRequest, RoundPosition, read_header, unpack


def message(skeleton: str, entries: str = "", data: bytes = b"") -> bytes:
    """Return bytes like an encoded tree, with any skeleton and header entries."""
    text = f'{{"__metadata__": {{"tree": {json.dumps(skeleton)}}}{entries}}}'.encode()
    return len(text).to_bytes(8, "little") + text + data


def peak_of(data: bytes) -> int:
    tracemalloc.start()
    try:
        decode_message(data)
    except ValueError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


BOMBS = {
    "dicts": '{"a": [' + "{}," * 400_000 + "0]}",
    "pairs": '{"a": [' + '{"":0},' * 300_000 + "0]}",
    "lists": '{"a": [' + "[]," * 400_000 + "0]}",
    "levels": '{"a": ' + "[" * 900_000 + "]" * 900_000 + "}",
    "strings": '{"a": [' + '"b",' * 400_000 + "0]}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_at_most_ten_times_the_message(name: str) -> None:
    data = message(BOMBS[name])
    assert peak_of(data) < 10 * len(data)


ENTRY = ', "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
HUGE = ', "x": {"dtype": "U8", "shape": [0, 4398046511104], "data_offsets": [0, 0]}'
REFUSED = {
    "a repeated key": message('{"a": 1, "a": 2}'),
    "a repeated tensor": message('{"a": {"__tensor__": "x"}}', ENTRY + ENTRY, b"\x00"),
    "a tensor in two places": message(
        '{"a": {"__tensor__": "x"}, "b": {"__tensor__": "x"}}', ENTRY, b"\x00"
    ),
    "a tensor in no place": message("{}", ENTRY, b"\x00"),
    "a place without a tensor": message('{"a": {"__tensor__": "x"}}'),
    "a place with more": message('{"a": {"__tensor__": "x", "b": 1}}', ENTRY, b"\x00"),
    "a tensor as the tree": message('{"__tensor__": "x"}', ENTRY, b"\x00"),
    "a huge extent": message('{"a": {"__tensor__": "x"}}', HUGE),
    "a complex type": encode({"a": torch.zeros(2, dtype=torch.complex64)}),
    "many levels": message('{"a": ' + "[" * 100 + "]" * 100 + "}"),
    "a list": message("[1]"),
    "no bytes": b"",
    "a size beyond the end": (2**63).to_bytes(8, "little") + b"{}",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_message_that_no_sender_makes(name: str) -> None:
    with pytest.raises(BadMessage, match="the message cannot be decoded"):
        unpack(REFUSED[name])


HEADER = json.loads(NodeRequest("train", RoundPosition(0, 0, 1), (0,)).to_header())
STRANGE: list[Any] = [
    {"clients": ["1"]}, {"clients": [True]}, {"clients": [1.0]}, {"clients": [0, 0]},
    {"clients": "12"}, {"clients": None}, {"clients": [-1]}, {"clients": [10**400]},
    {"tasks": {"0": 1}}, {"kind": ["train"]}, {"kind": "delete"},
    {"evaluates_on": {}}, {"evaluates_on": 1},
    {"requests": {"１": "00"}}, {"requests": {"-1": "00"}}, {"requests": {"1": "zz"}},
    {"requests": []}, {"counts": ["confusion", "confusion"]}, {"counts": "errors"},
    {"position": None}, {"position": {}}, {"position": [0]}, {"more": 1},
    *({"position": {**HEADER["position"], **change}} for change in
      ({"task": 10**400}, {"more": 0}, {"attempt": True}, {"round": "0"})),
]  # fmt: skip


@pytest.mark.parametrize("change", STRANGE, ids=lambda change: str(change)[:40])
def test_a_header_of_another_type(change: Any) -> None:
    read_header(json.dumps(HEADER))
    with pytest.raises(BadMessage):
        read_header(json.dumps({**HEADER, **change}))


@pytest.mark.parametrize("missing", HEADER)
def test_a_header_that_lacks_a_key(missing: str) -> None:
    with pytest.raises(BadMessage):
        read_header(json.dumps({key: v for key, v in HEADER.items() if key != missing}))


def test_a_header_of_many_levels() -> None:
    for depth in (70, 1000, 100_000):
        with pytest.raises(BadMessage, match=r"levels|deeply|too many"):
            read_header("[" * depth + "]" * depth)


def test_a_text_for_the_log_is_one_printable_line() -> None:
    assert one_line("a\n\x1b[31mb\ud800" + "c" * 1000).startswith("a [31mb c")
    assert len(one_line("c" * 10**6)) == 300


def test_json_that_many_honest_tensors_need_is_read() -> None:
    many = {f"layer.{k}.weight": torch.zeros(4) for k in range(5000)}
    assert len(decode_message(encode({"params": many}))["params"]) == 5000
    assert read_json('{"a": [1, 2.5, "x"]}') == {"a": [1, 2.5, "x"]}
