"""Trees are split and joined without loss."""

import json

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from perdure.core.trees import add, join_tree, split_tree, subtract, to_device

tensors = st.lists(st.integers(0, 3), max_size=3).flatmap(
    lambda shape: st.integers(-5, 5).map(lambda value: torch.full(shape, value))
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text(max_size=4).filter(lambda key: not key.startswith("__")) | st.sampled_from(
    ["", "/", "a", "a/b", "b", "~", "~1", "0"]
)
trees = st.dictionaries(
    keys,
    st.recursive(
        plain | tensors,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=12,
    ),
)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(trees)
@example({"a": {"b": torch.tensor(1)}, "a/b": torch.tensor(2)})
@example({"": {"a": torch.tensor(1)}, "a": torch.tensor(2)})
@example({"a~1b": torch.tensor(1), "a/b": torch.tensor(2)})
@example({"a": {}, "b": [], "c": [{}]})
def test_split_and_join_are_inverse_through_json(tree):
    skeleton, computed = split_tree(tree)
    assert same(join_tree(json.loads(json.dumps(skeleton)), computed), tree)


def test_tensors_are_named_by_their_path():
    _, computed = split_tree({"params": {"fc.weight": torch.zeros(1)}, "steps": [torch.ones(1), 3]})
    assert set(computed) == {"params/fc.weight", "steps/0"}


def test_tuples_become_lists_and_integer_keys_become_strings():
    assert join_tree(*split_tree({3: (1, 2)})) == {"3": [1, 2]}


def test_tensors_are_detached_and_contiguous():
    weight = torch.ones(2, 3, requires_grad=True)
    _, computed = split_tree({"w": (weight * 2).T})
    assert not computed["w"].requires_grad
    assert computed["w"].is_contiguous()


@pytest.mark.parametrize("value", [object(), {1, 2}, np.float32(1), b"x", np.zeros(2)])
def test_unsupported_types_are_refused_with_their_path(value):
    with pytest.raises(TypeError, match="at a/0"):
        split_tree({"a": [value]})


@pytest.mark.parametrize("tree", [{1: 0, "1": 0}, {"__tensor__": "x"}])
def test_ambiguous_keys_are_refused(tree):
    with pytest.raises(TypeError, match="cannot hold"):
        split_tree(tree)


def test_to_device_moves_tensors_and_nothing_else():
    tree = {"a": [torch.zeros(2), "text"], "b": {"c": torch.ones(1), "d": None}}
    moved = to_device(tree, torch.device("meta"))
    assert moved["a"][0].device.type == moved["b"]["c"].device.type == "meta"
    assert moved["a"][1] == "text"
    assert moved["b"]["d"] is None
    assert tree["a"][0].device.type == "cpu"


def test_add_scales_and_keeps_names_that_only_the_first_has():
    a = {"w": torch.tensor([1.0, 2.0]), "only": torch.tensor(5.0)}
    result = add(a, {"w": torch.tensor([10.0, 20.0])}, scale=0.5)
    assert result["w"].tolist() == [6.0, 12.0]
    assert result["only"] is a["only"]
    assert a["w"].tolist() == [1.0, 2.0]


def test_subtract_is_over_the_names_of_the_first():
    a = {"w": torch.tensor(3.0)}
    assert subtract(a, {"w": torch.tensor(1.0), "more": torch.tensor(1.0)}) == {"w": 2.0}
