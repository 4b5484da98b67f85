"""The byte ledger: sizes as safetensors would really encode, entered up and down."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from perdure.contract import Each, Sum
from perdure.contract.uploads import StackedUploads, stack_of_one
from perdure.training.ledger import Ledger, encode, encoded_size

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64,
    torch.complex64,
]  # fmt: skip

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
fields = st.dictionaries(
    names, st.tuples(st.sampled_from(DTYPES), shapes), max_size=6
).map(lambda items: {name: torch.zeros(s, dtype=d) for name, (d, s) in items.items()})  # fmt: skip


@given(fields)
def test_the_size_is_that_of_the_encoded_bytes(field: dict[str, torch.Tensor]) -> None:
    assert encoded_size(field) == len(encode(field))


@given(fields, st.integers(1, 3))
def test_a_stack_has_the_size_of_one_of_its_clients(
    field: dict[str, torch.Tensor], clients: int
) -> None:
    stack = {name: value.expand(clients, *value.shape) for name, value in field.items()}
    assert encoded_size(stack, stacked=True) == len(encode(field))


@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_every_pair_of_types(first: torch.dtype) -> None:
    """Types of one width have a separate order on the wire, which shifts the offsets."""
    for second in DTYPES:
        for sizes in ((1, 2000), (2000, 1)):
            field = {"a": torch.zeros(sizes[0], dtype=first)}
            field["b"] = torch.zeros(sizes[1], dtype=second)
            assert encoded_size(field) == len(encode(field)), (first, second)


def test_an_encoded_field_is_a_safetensors_block() -> None:
    field = {"w": torch.randn(3, 4).t(), "b": torch.arange(3)}
    found = load(encode(field))
    assert torch.equal(found["w"], field["w"])
    assert torch.equal(found["b"], field["b"])


def test_a_hand_computed_size() -> None:
    header = b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}'
    padded = (len(header) + 7) // 8 * 8
    assert encoded_size({"w": torch.zeros(2, 3)}) == 8 + padded + 24


def opened() -> Ledger:
    ledger = Ledger()
    ledger.begin_task()
    return ledger


def size(**tensors: torch.Tensor) -> int:
    return len(encode(tensors))


def test_uploads_are_counted_for_every_client_and_field() -> None:
    ledger = opened()
    update, basis = torch.zeros(10, 3), torch.zeros(7)
    ledger.count_uploads(
        stack_of_one(0, 1.0, {"update": Sum({"w": update}), "basis": Each({"u": basis})})
    )
    ledger.count_uploads(
        StackedUploads((1, 2), (1.0, 1.0), {"update": Sum({"w": update.expand(2, 10, 3)})})
    )
    assert ledger.by_field == {"up/update": 3 * size(w=update), "up/basis": size(u=basis)}
    assert ledger.types == {"update": "Sum", "basis": "Each"}
    assert ledger.up == 3 * size(w=update) + size(u=basis)
    assert ledger.by_task == [{"up": ledger.up, "down": 0}]


def test_a_broadcast_is_counted_for_every_client_in_every_round() -> None:
    ledger = opened()
    for clients in ([0, 1, 2], [1, 2], []):
        ledger.count_broadcast({"params": ({"w": torch.zeros(5)}, False)}, clients)
    assert ledger.by_field == {"down/params": 5 * size(w=torch.zeros(5))}


def test_a_lasting_part_is_counted_once_a_client_and_task() -> None:
    ledger, part = opened(), {"w": torch.zeros(5)}
    one = size(w=torch.zeros(5))
    ledger.count_broadcast({"frozen": (part, True)}, [0, 1])
    ledger.count_broadcast({"frozen": (part, True)}, [1, 2])
    ledger.count_broadcast({"frozen": (part, True)}, [0, 1, 2])
    assert ledger.by_task == [{"up": 0, "down": 3 * one}]
    ledger.begin_task()
    ledger.count_broadcast({"frozen": (part, True)}, [1])
    assert ledger.by_task == [{"up": 0, "down": 3 * one}, {"up": 0, "down": one}]
    assert ledger.down == 4 * one


def test_lasting_parts_are_remembered_by_name() -> None:
    ledger, one = opened(), size(w=torch.zeros(5))
    ledger.count_broadcast({"frozen": ({"w": torch.zeros(5)}, True)}, [0])
    ledger.count_broadcast({"basis": ({"w": torch.zeros(5)}, True)}, [0])
    assert ledger.by_field == {"down/frozen": one, "down/basis": one}


def test_a_nested_part_is_one_field() -> None:
    ledger = opened()
    basis = {"basis": {"fc1": torch.zeros(4), "fc2": torch.ones(2)}}
    ledger.count_broadcast({"basis": (basis, False)}, [0])
    flat = {"basis/fc1": torch.zeros(4), "basis/fc2": torch.ones(2)}
    assert ledger.by_field == {"down/basis": len(encode(flat))}


def test_nothing_sent_is_no_entry() -> None:
    ledger = opened()
    ledger.count_broadcast({"frozen": ({}, True)}, [0, 1])
    ledger.count_broadcast({"params": ({"w": torch.zeros(1)}, False)}, [])
    nothing = {"clients": 0, "up": {"mean": 0, "max": 0}, "down": {"mean": 0, "max": 0}}
    assert ledger.summary() == {
        "up": 0, "down": 0, "by_field": {}, "types": {}, "per_client": nothing, "kept": None,
        "by_task": [{"up": 0, "down": 0, "by_field": {}, "per_client": None}],
    }  # fmt: skip


def test_bytes_are_counted_by_task_field_and_client() -> None:
    ledger, one = opened(), size(w=torch.zeros(5))
    ledger.count_broadcast({"params": ({"w": torch.zeros(5)}, False)}, [0, 2])
    ledger.count_broadcast({"params": ({"w": torch.zeros(5)}, False)}, [2])
    ledger.end_task([30, 10], clients=4)
    ledger.begin_task()
    ledger.count_uploads(stack_of_one(7, 1.0, {"update": Sum({"w": torch.zeros(5)})}))
    ledger.count_broadcast({"params": ({"w": torch.zeros(5)}, False)}, [2])
    ledger.end_task([40], clients=4)
    found = ledger.summary()
    first, second = found["by_task"]
    assert first["by_field"] == {"down/params": 3 * one}
    assert first["per_client"] == {
        "clients": 2, "up": {"mean": 0, "max": 0}, "down": {"mean": 1.5 * one, "max": 2 * one},
    }  # fmt: skip
    assert second["by_field"] == {"up/update": one, "down/params": one}
    assert second["per_client"]["up"] == {"mean": one / 2, "max": one}
    assert found["per_client"] == {
        "clients": 3,
        "up": {"mean": one / 3, "max": one},
        "down": {"mean": 4 * one / 3, "max": 3 * one},
    }
    last = {"mean": 10.0, "max": 40}
    assert found["kept"] == {**last, "by_task": [{"mean": 10.0, "max": 30}, last]}


def test_the_totals_agree() -> None:
    ledger = opened()
    for task in range(3):
        ledger.count_broadcast({"params": ({"w": torch.zeros(task + 1)}, False)}, [0, 1])
        ledger.count_uploads(stack_of_one(0, 1.0, {"update": Sum({"w": torch.zeros(task + 2)})}))
        ledger.begin_task()
    found: dict[str, Any] = ledger.summary()
    for way in ("up", "down"):
        assert found[way] == sum(part[way] for part in found["by_task"])
        assert found[way] == sum(n for key, n in found["by_field"].items() if key.startswith(way))
