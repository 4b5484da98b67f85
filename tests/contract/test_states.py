"""Typed states as trees: what goes in comes back, and what does not fit is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perdure.contract import ContractError
from perdure.contract.uploads import Nothing
from perdure.core.states import from_tree, partial_from_tree, to_tree
from perdure.core.trees import decode, encode


@dataclass(frozen=True)
class Inner:
    """A state within a state."""

    basis: Tensor | None = None
    ranks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Outer:
    """Everything that a state may hold."""

    flag: bool = False
    count: int = 0
    rate: float = 0.0
    name: str = ""
    weights: dict[str, Tensor] = field(default_factory=dict)
    by_task: dict[int, Inner] = field(default_factory=dict)
    nested: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    pair: tuple[float, ...] = ()
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None


tensors = st.tuples(
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
).map(lambda drawn: _tensor(*drawn))
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(
    lambda name: name not in ("__tensor__", "__metadata__")
)
numbers = st.floats(allow_nan=False)
inners = st.builds(
    Inner, st.none() | tensors, st.lists(st.integers(-(2**40), 2**40), max_size=3)
)  # fmt: skip
outers = st.builds(
    Outer,
    flag=st.booleans(),
    count=st.integers(-(2**40), 2**40),
    rate=numbers,
    name=names,
    weights=st.dictionaries(names, tensors, max_size=3),
    by_task=st.dictionaries(st.integers(0, 20), inners, max_size=3),
    nested=st.dictionaries(names, st.dictionaries(names, tensors, max_size=2), max_size=2),
    pair=st.lists(numbers, max_size=2).map(tuple),
    inner=inners,
    maybe=st.none() | inners,
)


def _tensor(dtype: torch.dtype, shape: list[int], seed: int) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (4 * drawn).to(dtype)


def assert_same(a: Any, b: Any) -> None:
    """Compare values and their types; a dataclass with tensors has no usable ==."""
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert type(key) is type(next(k for k in b if k == key))
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif hasattr(a, "__dataclass_fields__"):
        assert_same(vars(a), vars(b))
    else:
        assert a == b


@given(outers)
def test_a_state_survives_a_round_trip(state: Outer) -> None:
    assert_same(from_tree(Outer, to_tree(state)), state)


@given(outers)
def test_a_state_survives_a_round_trip_through_a_file(state: Outer) -> None:
    assert_same(from_tree(Outer, decode(encode({"state": to_tree(state)}))["state"]), state)


def test_an_empty_state_survives_a_round_trip() -> None:
    assert to_tree(Nothing()) == {}
    assert from_tree(Nothing, {}) == Nothing()


def test_an_integer_is_accepted_as_a_float_and_nothing_else_is_converted() -> None:
    assert_same(from_tree(float, 3), 3.0)
    for kind, value in ((int, 3.0), (float, True), (str, 3), (Tensor, [1.0]), (bool, 1)):
        with pytest.raises(ContractError, match="got a"):
            from_tree(kind, value)


OTHER = {"basis": None, "rank": [1]}


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            OTHER,
            "(Inner): must be a dict with the fields ['basis', 'ranks'], got ['basis', 'rank']",
        ),
        ({"basis": None}, "must be a dict with the fields ['basis', 'ranks'], got ['basis']"),
        ([1, 2], "saved (Inner): must be a dict with the fields ['basis', 'ranks'], got a list"),
        (OTHER | {"ranks": 3}, "the fields ['basis', 'ranks'], got ['basis', 'rank', 'ranks']"),
        ({"basis": 1, "ranks": []}, "saved.basis: must be a Tensor or None, got an int"),
        ({"basis": None, "ranks": ["x"]}, "saved.ranks[0]: must be an int, got a str"),
        ({"basis": None, "ranks": {}}, "saved.ranks: must be a list, got a dict"),
    ],
    ids=str,
)
def test_other_fields_are_refused_with_both_lists(tree: Any, sentence: str) -> None:
    with pytest.raises(ContractError) as refusal:
        from_tree(Inner, tree, "saved")
    assert sentence in str(refusal.value)


def test_an_error_in_a_nested_state_is_named_by_its_path() -> None:
    tree = to_tree(Outer(by_task={7: Inner()}))
    tree["by_task"]["7"]["ranks"] = [0.5]
    with pytest.raises(ContractError, match=r"\['7'\]\.ranks\[0\]: must be an int, got a float"):
        from_tree(Outer, tree)


@pytest.mark.parametrize(
    ("state", "where"),
    [
        (
            Outer(name=object()),
            "memory.name: must be made of tensors, numbers, strings, lists, dicts and None, got an",
        ),  # type: ignore[arg-type]
        (Outer(weights={"w": torch.float32}), "memory.weights['w']: must be made of tensors"),  # type: ignore[dict-item]
        (Outer(pair=(1.0, {2.0})), "memory.pair[1]: must be made of tensors"),  # type: ignore[arg-type]
    ],
    ids=["text", "dict", "tuple"],
)
def test_a_value_that_cannot_be_saved_is_refused_by_its_path(state: Outer, where: str) -> None:
    with pytest.raises(ContractError) as refusal:
        to_tree(state, "memory")
    assert where in str(refusal.value)


def test_a_part_of_a_state_has_defaults_for_the_rest() -> None:
    basis = torch.ones(2)
    found = partial_from_tree(Outer, {"count": 3, "inner": {"basis": basis}})
    assert_same(found, Outer(count=3, inner=Inner(basis)))
    assert_same(partial_from_tree(Outer, {}), Outer())
    with pytest.raises(ContractError, match="got gone"):
        partial_from_tree(Outer, {"gone": 1})
    with pytest.raises(ContractError, match=r"state\.count: must be an int, got a str"):
        partial_from_tree(Outer, {"count": "three"})
