"""Outputs, masks and growing heads, on tables worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.core.rng import Rng
from perdure.models import ForwardPass, Network, Outputs, make_network
from perdure.models.modules.mlp import MlpModel

TASKS = ((3, 1), (0, 3), (4,))  # class 3 is in two tasks, class 2 in none
SHARED = Outputs("shared", 5, TASKS)
GROWING = Outputs("growing", 5, TASKS)


def test_shared_outputs_equal_values_by_hand() -> None:
    assert [SHARED.count(t) for t in range(3)] == [5, 5, 5]
    assert SHARED.output_labels(0).tolist() == [0, 1, 2, 3, 4]
    assert SHARED.targets(0).tolist() == [-1, 1, -1, 3, -1]
    assert SHARED.targets(2).tolist() == [-1, -1, -1, -1, 4]
    assert SHARED.task_mask(1, 2).tolist() == [True, False, False, True, False]
    assert SHARED.task_mask(1, 2, [0, 1]).tolist() == [True, False, False, False, False]
    assert SHARED.seen_mask(0).tolist() == [False, True, False, True, False]
    assert SHARED.seen_mask(2).tolist() == [True, True, False, True, True]


def test_growing_outputs_equal_values_by_hand() -> None:
    assert [GROWING.count(t) for t in range(3)] == [2, 4, 5]
    assert GROWING.output_labels(0).tolist() == [3, 1]
    assert GROWING.output_labels(2).tolist() == [3, 1, 0, 3, 4]
    assert GROWING.targets(0).tolist() == [-1, 1, -1, 0, -1]
    assert GROWING.targets(1).tolist() == [2, -1, -1, 3, -1]
    assert GROWING.task_mask(0, 1).tolist() == [True, True, False, False]
    assert GROWING.task_mask(1, 2).tolist() == [False, False, True, True, False]
    assert GROWING.task_mask(1, 2, (3,)).tolist() == [False, False, False, True, False]
    assert GROWING.seen_mask(1).tolist() == [True] * 4


@given(
    st.sampled_from(["shared", "growing"]),
    st.lists(
        st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True), min_size=1, max_size=5
    ),
)
def test_targets_and_output_labels_agree(kind: str, tasks: list[list[int]]) -> None:
    outputs = Outputs(kind, 9, tuple(map(tuple, tasks)))  # type: ignore[arg-type]
    newest = len(tasks) - 1
    output_labels = outputs.output_labels(newest)
    assert len(output_labels) == outputs.count(newest)
    for task, labels in enumerate(tasks):
        indices = outputs.targets(task)[labels]
        assert output_labels[indices].tolist() == labels
        mask = outputs.task_mask(task, newest)
        assert sorted(mask.nonzero()[:, 0].tolist()) == sorted(indices.tolist())
    assert set(output_labels[outputs.seen_mask(newest)].tolist()) == set().union(*tasks)


def network(outputs: Outputs, bias: bool = True) -> Network:
    return make_network(MlpModel(hidden=[6], bias=bias), (4,), outputs)


def test_a_shared_head_never_grows() -> None:
    net = network(SHARED)
    rng = Rng(0)
    params, _ = net.init(rng.torch_generator("init"))
    assert net.grow(params, 2, rng) is params
    assert net.head_names(params) == net.head_names(params, 1) == ("head.weight", "head.bias")
    assert params["head.weight"].shape == (5, 6)


@pytest.mark.parametrize("bias", [True, False])
def test_a_growing_head_gets_one_block_per_task(bias: bool) -> None:
    net = network(GROWING, bias)
    rng = Rng(0)
    first, _ = net.init(rng.torch_generator("init"))
    both = net.grow(first, 1, rng)
    assert "head.1.weight" not in first
    assert net.grow(both, 1, rng) is both
    names = ("head.1.weight", "head.1.bias") if bias else ("head.1.weight",)
    assert net.head_names(both, 1) == names
    x = torch.randn(3, 4)
    features = net.features(both, x, ForwardPass())
    parts = [features @ both[f"head.{t}.weight"].T for t in (0, 1)]
    if bias:
        parts = [part + both[f"head.{t}.bias"] for t, part in enumerate(parts)]
    torch.testing.assert_close(net.logits(both, x, ForwardPass()), torch.cat(parts, 1))
    torch.testing.assert_close(net.logits(first, x, ForwardPass()), parts[0])


def test_blocks_stay_in_the_order_of_tasks_beyond_ten() -> None:
    """head.10 sorts before head.2 as text; outputs must not."""
    outputs = Outputs("growing", 12, tuple((t,) for t in range(12)))
    net = network(outputs)
    params, _ = net.init(torch.Generator().manual_seed(0))
    for task in reversed(range(12)):
        params = net.grow(params, task, Rng(0))
    params = {n: torch.zeros_like(p) for n, p in params.items()}
    params |= {f"head.{t}.bias": torch.tensor([float(t)]) for t in range(12)}
    assert net.logits(params, torch.ones(1, 4), ForwardPass())[0].tolist() == list(range(12))
    assert len(net.head_names(params, 1)) == 2


def test_a_block_is_drawn_for_its_task_independently_of_earlier_ones() -> None:
    net, first = network(GROWING), {"fc1.weight": torch.zeros(6, 4)}
    late = net.grow(first, 2, Rng(0))["head.2.weight"]
    step = net.grow(net.grow(first, 1, Rng(0)), 2, Rng(0))
    assert torch.equal(step["head.2.weight"], late)
    assert not torch.equal(net.grow(first, 2, Rng(1))["head.2.weight"], late)


def test_the_recorded_input_of_the_head_is_the_features() -> None:
    net = network(GROWING)
    rng = Rng(0)
    params = net.grow(net.init(rng.torch_generator("init"))[0], 1, rng)
    fwd = ForwardPass(layer_inputs={})
    features = net.features(params, torch.randn(3, 4), fwd)
    net.classify(params, features, fwd)
    assert fwd.layer_inputs is not None
    assert set(fwd.layer_inputs) == {"fc1.weight", "head.0.weight", "head.1.weight"}
    assert fwd.layer_inputs["head.1.weight"] is features
