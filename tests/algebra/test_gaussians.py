"""Gaussians of classes against numpy on the rows."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.algebra.class_statistics import Gaussians, draw_around
from perdure.contract import Sum
from perdure.contract.uploads import stack_of_one
from perdure.training.collector import UploadCollector

SIZE = 3
client_lists = st.lists(
    st.tuples(
        st.integers(0, 2**31 - 1),  # seed of its rows
        st.lists(st.integers(0, 6), min_size=4, max_size=4),  # rows of each class
        st.floats(0.5, 500.0),  # omega
    ).filter(lambda client: sum(client[1]) > 0),
    min_size=1,
    max_size=6,
)


def rows_of(seed: int, counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
    return rng.normal(rng.normal(), 1.5, (len(labels), SIZE)).astype(np.float32), labels


def gaussians_of(rows: np.ndarray, labels: np.ndarray) -> Gaussians:
    return Gaussians.of(torch.from_numpy(rows), torch.from_numpy(labels), 4)


def test_the_moments_of_each_class_equal_those_of_numpy() -> None:
    rows, labels = rows_of(3, [5, 0, 1, 7])
    computed = gaussians_of(rows, labels)
    assert computed.there.tolist() == [1, 0, 1, 1]
    for label in (0, 2, 3):
        class_rows = rows[labels == label].astype(np.float64)
        np.testing.assert_allclose(computed.mean[label], class_rows.mean(0), rtol=1e-6)
        np.testing.assert_allclose(computed.variance[label], class_rows.var(0), rtol=1e-6)
    assert not computed.mean[1].any()
    assert not computed.variance[1:3].any()  # one row: variance 0, and not NaN


@settings(max_examples=60)
@given(client_lists)
def test_merged_sums_are_the_moments_of_the_pooled_rows(
    clients: list[tuple[int, list[int], float]],
) -> None:
    """Every client's class has the weight omega_l in total, whatever its number of rows."""
    collector, pooled, weights, labels = UploadCollector(), [], [], []
    for number, (seed, counts, omega) in enumerate(clients):
        rows, client_labels = rows_of(seed, counts)
        upload = {"prototypes": Sum(gaussians_of(rows, client_labels).summands(), weight=omega)}
        collector.add(stack_of_one(number, 1.0, upload))
        pooled.append(rows)
        labels.append(client_labels)
        weights.append(omega / np.bincount(client_labels, minlength=4)[client_labels])
    x, y, w = (
        np.concatenate(pooled).astype(np.float64),
        np.concatenate(labels),
        np.concatenate(weights),
    )
    computed = Gaussians.from_sums(collector.collected.total("prototypes"))
    for label in range(4):
        in_class = y == label
        assert bool(computed.there[label]) == in_class.any()
        if in_class.any():
            mean = np.average(x[in_class], axis=0, weights=w[in_class])
            variance = np.average((x[in_class] - mean) ** 2, axis=0, weights=w[in_class])
            np.testing.assert_allclose(computed.mean[label], mean, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(computed.variance[label], variance, rtol=1e-5, atol=1e-5)
        else:
            assert not computed.mean[label].any()
            assert not computed.variance[label].any()


def test_weights_by_rows_give_the_moments_of_all_rows() -> None:
    """With one class per client and omega = its number of rows, all rows have equal weight."""
    parts = [rows_of(seed, [count, 0, 0, 0]) for seed, count in ((1, 3), (2, 9), (5, 1))]
    collector = UploadCollector()
    for number, (rows, labels) in enumerate(parts):
        value = gaussians_of(rows, labels).summands()
        collector.add(stack_of_one(number, float(len(rows)), {"prototypes": Sum(value)}))
    computed = Gaussians.from_sums(collector.collected.total("prototypes"))
    x = np.concatenate([rows for rows, _ in parts]).astype(np.float64)
    np.testing.assert_allclose(computed.mean[0], x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(computed.variance[0], x.var(0), rtol=1e-5)
    assert computed.there.tolist() == [1, 0, 0, 0]


def test_means_alone_give_variance_0() -> None:
    rows, labels = rows_of(0, [4, 4, 4, 4])
    computed = gaussians_of(rows, labels)
    summands = computed.summands(with_variance=False)
    assert set(summands) == {"there", "mean"}
    merged = Gaussians.from_sums(summands)
    torch.testing.assert_close(merged.mean, computed.mean)
    assert not merged.variance.any()


def test_a_variance_is_never_negative() -> None:
    value = torch.full((1, 2), 1000.1)
    totals = {"there": torch.tensor([3.0]), "mean": 3 * value, "square": 3 * value.square() - 1}
    assert bool((Gaussians.from_sums(totals).variance >= 0).all())


def test_classes_without_uploads_keep_their_previous_gaussian() -> None:
    old = gaussians_of(*rows_of(0, [2, 2, 0, 0]))
    new = gaussians_of(*rows_of(1, [0, 3, 3, 0]))
    both = new.fill_missing(old)
    assert both.there.tolist() == [1, 1, 1, 0]
    torch.testing.assert_close(both.mean, torch.stack([old.mean[0], *new.mean[1:]]))
    torch.testing.assert_close(both.variance[0], old.variance[0])


def test_points_lie_within_one_deviation_on_the_requested_side() -> None:
    gaussians = gaussians_of(*rows_of(0, [6, 6, 6, 6]))
    deviation = gaussians.variance.sqrt()
    generator = torch.Generator().manual_seed(0)
    points = draw_around(gaussians, 5, False, generator)
    assert points.shape == (6, 4, SIZE)
    torch.testing.assert_close(points[0], gaussians.mean)
    beta = (points[1:] - gaussians.mean) / deviation
    assert bool(((beta > -1e-5) & (beta < 1 + 1e-5)).all())
    assert abs(float(beta.mean()) - 0.5) < 0.15  # 60 draws of U(0, 1)
    assert len({round(float(value), 5) for value in beta.flatten()}) == 60  # one per coordinate
    sides = draw_around(gaussians, 4, True, generator)[1:] - gaussians.mean
    assert bool((sides[0::2] >= -1e-6).all())
    assert bool((sides[1::2] <= 1e-6).all())
