"""Checkpoints: the latest valid one is used, whatever happened to the others."""

import logging
import math
import os
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from perdure.core.trees import copy_tree, decode, encode
from perdure.runs import checkpoint

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]

tensors = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)).map(
    lambda kind: torch.arange(math.prod(kind[1])).reshape(kind[1]).to(kind[0])
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | tensors
keys = st.text(max_size=5).filter(lambda key: not key.startswith("__"))
trees = st.dictionaries(
    keys,
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=10,
    ),
)


class Killed(BaseException):
    """Stands for the end of the process at some step."""


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return type(a) is type(b) and a == b


@given(trees)
def test_every_tree_is_restored_unchanged(tree):
    assert same(tree, decode(encode(tree)))
    assert same(tree, copy_tree(tree))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.1 + 0.2, 5e-324])
def test_floats_are_restored_bit_for_bit(value):
    found = decode(encode({"x": value}))["x"]
    assert same(found, value)


def test_tensors_are_restored_bit_for_bit(tmp_path):
    odd = torch.tensor([math.nan, math.inf, -0.0, 1e-45])
    checkpoint.save(tmp_path, 0, {"x": odd})
    _, tree = checkpoint.latest(tmp_path)
    assert torch.equal(tree["x"].view(torch.int32), odd.view(torch.int32))


def test_tensors_that_share_memory_and_views_can_be_saved():
    weight = torch.arange(12.0).reshape(3, 4)
    tree = {"a": weight, "b": weight, "row": weight[1], "turned": weight.T}
    assert same(decode(encode(tree)), tree | {"turned": weight.T.contiguous()})


def test_copies_do_not_keep_their_stack_in_memory():
    stack = torch.zeros(100, 5)
    kept = copy_tree({"x": stack[3]})["x"]
    assert kept.untyped_storage().nbytes() == 5 * 4
    stack.fill_(1)
    assert kept.sum() == 0


def test_loaded_tensors_can_be_changed_in_place():
    tree = decode(encode({"x": torch.zeros(3), "y": torch.zeros(3)}))
    tree["x"].add_(1)
    assert tree["y"].sum() == 0


def test_the_file_is_plain_safetensors_named_by_its_hash(tmp_path):
    path = checkpoint.save(tmp_path, 12, {"w": torch.ones(2), "n": 3})
    assert path.parent == tmp_path
    assert path.name.startswith("00000012-")
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == {"w"}


@pytest.mark.parametrize("data", [b"", b"\x00" * 7, b"\xff" * 50, b"\x02" + b"\0" * 7 + b"{}"])
def test_bytes_that_are_no_tree_are_a_value_error(data):
    with pytest.raises(ValueError, match="not a saved tree"):
        decode(data)


def test_no_folder_or_an_empty_one_has_no_checkpoint(tmp_path):
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.latest(tmp_path) is None
    checkpoint.prune(tmp_path / "none", 2)


def test_the_largest_number_is_the_latest_even_beyond_eight_digits(tmp_path):
    for number in (99_999_999, 3, 100_000_000)[::-1]:
        (tmp_path / str(number)).mkdir()
        source = checkpoint.save(tmp_path / str(number), number, {"n": number})
        source.rename(tmp_path / source.name)
    path, tree = checkpoint.latest(tmp_path)
    assert (checkpoint.number_of(path), tree) == (100_000_000, {"n": 100_000_000})


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def empty(path):
    path.write_bytes(b"")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def replace_by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [truncate, empty, flip_a_bit, lengthen, replace_by_folder])
def test_an_invalid_checkpoint_is_logged_and_skipped(tmp_path, caplog, harm):
    for number in range(3):
        path = checkpoint.save(tmp_path, number, {"n": number, "w": torch.ones(9) * number})
    harm(path)
    with caplog.at_level(logging.WARNING):
        valid, tree = checkpoint.latest(tmp_path)
    assert (checkpoint.number_of(valid), tree["n"]) == (1, 1)
    assert path.name in caplog.text


def test_any_changed_byte_makes_a_checkpoint_invalid(tmp_path):
    path = checkpoint.save(tmp_path, 0, {"n": 1, "w": torch.ones(4)})
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
        assert checkpoint.latest(tmp_path) is None
    path.write_bytes(good)
    assert checkpoint.latest(tmp_path) is not None


def test_without_a_valid_checkpoint_latest_is_none(tmp_path, caplog):
    for number in range(2):
        truncate(checkpoint.save(tmp_path, number, {"n": number}))
    assert checkpoint.latest(tmp_path) is None
    assert len(caplog.records) == 2


def test_an_unreadable_file_with_a_correct_hash_is_skipped(tmp_path):
    checkpoint.save(tmp_path, 0, {"n": 0})
    data = b"not safetensors at all"
    (tmp_path / checkpoint.hash_name(1, data, ".safetensors")).write_bytes(data)
    path, tree = checkpoint.latest(tmp_path)
    assert (checkpoint.number_of(path), tree) == (0, {"n": 0})


def test_other_files_in_the_folder_are_ignored(tmp_path, caplog):
    path = checkpoint.save(tmp_path, 4, {"n": 4})
    (tmp_path / f".{path.name}.00ff.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "00000009-short.safetensors").write_bytes(b"")
    path, tree = checkpoint.latest(tmp_path)
    assert (checkpoint.number_of(path), tree) == (4, {"n": 4})
    assert not caplog.records
    checkpoint.prune(tmp_path, 1)
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {path.name, "notes.txt", "00000009-short.safetensors"}


def test_prune_keeps_the_newest(tmp_path):
    for number in range(5):
        checkpoint.save(tmp_path, number, {"n": number})
    checkpoint.prune(tmp_path, 2)
    assert [checkpoint.read(path)["n"] for path in checkpoint.paths(tmp_path)] == [4, 3]


def test_saving_deletes_checkpoints_with_larger_numbers(tmp_path):
    for number in range(4):
        path = checkpoint.save(tmp_path, number, {"n": number})
    truncate(path)
    checkpoint.save(tmp_path, 2, {"n": "two again"})
    assert [checkpoint.read(each)["n"] for each in checkpoint.paths(tmp_path)] == [
        "two again",
        1,
        0,
    ]


def test_killed_at_any_step_there_is_a_valid_checkpoint(tmp_path, monkeypatch):
    """Stop a save-and-prune at each system call in turn, as a kill would."""
    checkpoint.save(tmp_path, 0, {"n": 0})
    rng = random.Random(0)
    for number in range(1, 25):
        countdown = rng.randrange(6)

        def step(real, *args):
            nonlocal countdown
            countdown -= 1
            if countdown < 0:
                raise Killed
            return real(*args)

        with monkeypatch.context() as patch:
            for name in ("fsync", "replace", "unlink"):
                real = getattr(os, name)
                patch.setattr(os, name, lambda *args, real=real, **_: step(real, *args))
            try:
                checkpoint.save(tmp_path, number, {"n": number})
                checkpoint.prune(tmp_path, 2)
            except Killed:
                pass
        path, tree = checkpoint.latest(tmp_path)
        found = checkpoint.number_of(path)
        assert found in {number, number - 1}
        assert tree == {"n": found}
        checkpoint.save(tmp_path, number, {"n": number})
