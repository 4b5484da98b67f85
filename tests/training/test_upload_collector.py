"""Typed uploads: sums and single values against numpy, and what is not finite is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.contract import Each, Sum
from perdure.contract.uploads import StackedUploads, stack_of_one
from perdure.training.collector import UploadCollector, finite_clients

SHAPES = {"w": (3, 2), "b": (4,), "s": ()}


def values(clients: int, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Values of each client, stacked, in double precision."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(clients, *shape)) for name, shape in SHAPES.items()}


def tensors(stacked: dict[str, np.ndarray[Any, Any]], rows: slice) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value[rows]) for name, value in stacked.items()}


def tallied(stacked: Any, weights: list[float], chunks: list[int], kind: Any) -> UploadCollector:
    """The clients' values, sent in chunks of these sizes."""
    collector, first = UploadCollector(), 0
    for size in chunks:
        rows = slice(first, first + size)
        numbers = tuple(range(first, first + size))
        fields = {"update": kind(tensors(stacked, rows))}
        collector.add(StackedUploads(numbers, tuple(weights[rows]), fields))
        first += size
    return collector


@given(
    chunks=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kind=st.sampled_from([Sum, Each]),
    seed=st.integers(0, 99),
)
def test_a_mean_is_the_weighted_mean_however_the_clients_are_stacked(
    chunks: list[int], kind: Any, seed: int
) -> None:
    clients = sum(chunks)
    stacked = values(clients, seed)
    weights = [float(w) for w in np.random.default_rng(seed).integers(1, 50, clients)]
    uploads = tallied(stacked, weights, chunks, kind).collected
    for name, value in stacked.items():
        expected = np.average(value, axis=0, weights=weights)
        np.testing.assert_allclose(uploads.mean("update")[name].numpy(), expected, atol=1e-12)
    assert uploads.clients == list(range(clients))
    assert uploads.client_weights == dict(enumerate(weights))


def test_a_sum_reveals_the_total_and_no_single_client() -> None:
    stacked, weights = values(4), [1.0, 2.0, 3.0, 4.0]
    uploads = tallied(stacked, weights, [3, 1], Sum).collected
    for name, value in stacked.items():
        expected = np.tensordot(weights, value, axes=1)
        np.testing.assert_allclose(uploads.total("update")[name].numpy(), expected, atol=1e-12)
    assert uploads.weights == {"update": 10.0}
    assert uploads.per_client == {}


def test_each_keeps_every_client_in_the_order_of_its_index() -> None:
    stacked = values(5)
    uploads = tallied(stacked, [1.0] * 5, [2, 2, 1], Each).collected
    assert list(uploads.per_client["update"]) == [0, 1, 2, 3, 4]
    for client, value in uploads.per_client["update"].items():
        np.testing.assert_array_equal(value["w"].numpy(), stacked["w"][client])
    assert uploads.sums == {}


def test_a_field_may_have_a_separate_weight() -> None:
    collector = UploadCollector()
    for client, (size, value) in enumerate([(10.0, 1.0), (90.0, 3.0)]):
        value_tensor = {"v": torch.tensor([value])}
        fields = {"update": Sum(value_tensor), "count": Sum(value_tensor, weight=1.0)}
        collector.add(stack_of_one(client, size, fields))
    assert collector.collected.mean("update")["v"].item() == pytest.approx(2.8)
    assert collector.collected.mean("count")["v"].item() == pytest.approx(2.0)
    assert collector.collected.weights == {"update": 100.0, "count": 2.0}


def test_one_client_is_a_stack_of_one() -> None:
    uploads = stack_of_one(
        7, 2.0, {"a": Sum({"v": torch.ones(3)}, 5.0), "b": Each({"v": torch.ones(2)})}
    )
    assert (uploads.clients, uploads.weights) == ((7,), (2.0,))
    assert isinstance(uploads.fields["a"], Sum)
    assert uploads.fields["a"].weight == 5.0
    assert isinstance(uploads.fields["b"], Each)
    assert [tuple(part.value["v"].shape) for part in uploads.fields.values()] == [(1, 3), (1, 2)]


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "one by one"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16], ids=str)
def test_weights_are_not_cut_to_the_type_of_the_values(stacked: bool, dtype: torch.dtype) -> None:
    """Half a client must not count as none, and large weights must not overflow."""
    counts = torch.tensor([[3], [5]], dtype=dtype)
    for weights, expected in (((0.5, 0.5), 4.0), ((60_000.0, 20_000.0), 3.5)):
        collector = UploadCollector()
        if stacked:
            collector.add(StackedUploads((0, 1), weights, {"counts": Sum({"n": counts})}))
        else:
            for client in (0, 1):
                field = Sum({"n": counts[client]})
                collector.add(stack_of_one(client, weights[client], {"counts": field}))
        assert collector.collected.mean("counts")["n"].tolist() == [expected]


BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", [Sum, Each])
@pytest.mark.parametrize("place", [("w", (1, 1)), ("b", (3,)), ("s", ())], ids=str)
def test_a_client_with_one_value_that_is_not_finite_is_rejected(
    bad: float, kind: Any, place: Any
) -> None:
    stacked, weights = values(4), [1.0, 2.0, 3.0, 4.0]
    clean = {name: value.copy() for name, value in stacked.items()}
    stacked[place[0]][(2, *place[1])] = bad
    collector = tallied(stacked, weights, [4], kind)
    assert collector.rejected == [2]
    assert collector.collected.clients == [0, 1, 3]
    for name, value in clean.items():
        expected = np.average(value[[0, 1, 3]], axis=0, weights=[1, 2, 4])
        found = collector.collected.mean("update")[name].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-12)


def test_infinities_of_both_signs_do_not_cancel() -> None:
    value = torch.tensor([[float("inf"), float("-inf")], [1.0, 2.0]])
    assert finite_clients(StackedUploads((0, 1), (1.0, 1.0), {"u": Sum({"v": value})})) == [
        False,
        True,
    ]


def test_a_bad_value_in_one_field_takes_the_client_out_of_every_field() -> None:
    good, bad = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [float("nan")]])
    collector = UploadCollector()
    collector.add(
        StackedUploads((4, 9), (1.0, 1.0), {"a": Sum({"v": good}), "b": Each({"v": bad})})
    )
    assert collector.rejected == [9]
    assert collector.collected.total("a")["v"].tolist() == [1.0]
    assert list(collector.collected.per_client["b"]) == [4]


def test_large_finite_values_are_finite_though_their_sum_is_not() -> None:
    large = torch.full((2, 8), 3e38)
    half = torch.full((2, 8), 6e4, dtype=torch.float16)
    fields = {"a": Each({"v": large}), "b": Each({"v": half})}
    assert finite_clients(StackedUploads((0, 1), (1.0, 1.0), fields)) == [True, True]


@pytest.mark.parametrize("weight", [1e308, 3e38, 1e31, float("inf"), float("nan")])
@pytest.mark.parametrize("own", [True, False])
def test_a_weight_that_overflows_the_sum_rejects_its_client_alone(weight: float, own: bool) -> None:
    collector = UploadCollector()
    for client, factor in enumerate((1.0, weight, 2.0)):
        field = Sum({"v": torch.full((1, 2), 5.0)}, factor if own else None)
        given = 1.0 if own else factor
        collector.add(StackedUploads((client,), (given,), {"update": field}))
    assert collector.rejected == [1]
    assert collector.collected.mean("update")["v"].tolist() == [5.0, 5.0]


@pytest.mark.parametrize(("value", "weight"), [(1e20, 1e20), (3e38, 1.0), (1e29, 100.0)])
def test_a_weighted_value_that_overflows_the_sum_rejects_its_client_alone(
    value: float, weight: float
) -> None:
    stacked = torch.tensor([[1.0], [value], [3.0]])
    collector = UploadCollector()
    collector.add(StackedUploads((0, 1, 2), (1.0, weight, 1.0), {"update": Sum({"v": stacked})}))
    assert collector.rejected == [1]
    assert collector.collected.mean("update")["v"].tolist() == [2.0]


def test_kept_uploads_can_be_collected_without_some_clients() -> None:
    collector = UploadCollector()
    collector.keeps_uploads = True
    for client in range(3):
        fields = {"a": Sum({"v": torch.full((1,), float(client))}), "b": Each({"v": torch.ones(1)})}
        collector.add(StackedUploads((client,), (1.0,), fields))
    part = collector.only({0, 2})
    assert part.clients == [0, 2]
    assert part.mean("a")["v"].item() == 1.0
    assert list(part.per_client["b"]) == [0, 2]
    assert collector.collected.clients == [0, 1, 2]


def test_integers_are_always_finite() -> None:
    fields = {"a": Sum({"v": torch.ones(1, 2, dtype=torch.int64)}), "b": Each({"v": torch.ones(1)})}
    assert finite_clients(StackedUploads((0,), (1.0,), fields)) == [True]


def test_nothing_is_counted_when_all_are_rejected() -> None:
    collector = UploadCollector()
    collector.add(
        StackedUploads((1, 2), (1.0, 1.0), {"u": Sum({"v": torch.full((2, 3), float("nan"))})})
    )
    assert collector.rejected == [1, 2]
    assert collector.collected.clients == []
    assert collector.collected.sums == {}
