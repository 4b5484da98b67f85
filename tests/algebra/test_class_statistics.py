"""Closed-form classifiers from sums, against scikit-learn and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid
from torch import Tensor

from perdure.algebra.class_statistics import (
    class_means,
    class_totals,
    discriminant_head,
    nearest_mean_head,
    quadratic_logits,
    ridge_head,
    shrink,
    within_scatter,
)

CLASSES, SIZE = 4, 6


def examples(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(rows) % CLASSES
    centers = 2 * torch.randn(CLASSES, SIZE, generator=generator)
    mixing = torch.randn(SIZE, SIZE, generator=generator)
    noise = torch.randn(rows, SIZE, generator=generator) @ mixing
    return centers[labels] + noise, labels


def sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (*class_totals(x, y, CLASSES), x.double().T @ x.double())


def test_ridge_regression_is_that_of_scikit_learn() -> None:
    x, y = examples(50)
    head = ridge_head(*sums(x, y), strength=0.7)
    oracle = Ridge(alpha=0.7).fit(x.numpy(), np.eye(CLASSES)[y.numpy()])
    np.testing.assert_allclose(head.weight, oracle.coef_, atol=1e-6)
    np.testing.assert_allclose(head.bias, oracle.intercept_, atol=1e-6)


def test_the_nearest_mean_is_that_of_scikit_learn() -> None:
    x, y = examples(60)
    fresh, _ = examples(40, seed=1)
    count, total, _ = sums(x, y)
    answers = nearest_mean_head(total / count.unsqueeze(1)).logits(fresh).argmax(1)
    oracle = NearestCentroid().fit(x.numpy(), y.numpy())
    np.testing.assert_array_equal(answers, oracle.predict(fresh.numpy()))


def test_scatter_within_classes_is_that_of_numpy() -> None:
    x, y = examples(60)
    rows = x.double().numpy()
    centered = [rows[y.numpy() == c] - rows[y.numpy() == c].mean(0) for c in range(CLASSES)]
    expected = sum(part.T @ part for part in centered)
    np.testing.assert_allclose(within_scatter(*sums(x, y)), expected, atol=1e-9)


@pytest.mark.parametrize("shared", [True, False])
def test_discriminants_are_the_log_densities_of_gaussian_classes(shared: bool) -> None:
    x, y = examples(80)
    fresh, _ = examples(20, seed=2)
    count, total, gram = sums(x, y)
    means, covariance = class_means(count, total), within_scatter(count, total, gram) / len(x)
    if shared:
        covariances = covariance.expand(CLASSES, SIZE, SIZE)
        logits = discriminant_head(count, means, covariance).logits(fresh)
    else:
        covariances = covariance * torch.arange(1, CLASSES + 1).double()[:, None, None]
        logits = quadratic_logits(fresh, count, means, covariances)
    expected = np.stack(
        [
            multivariate_normal(means[c].numpy(), covariances[c].numpy()).logpdf(fresh.numpy())
            + np.log(count[c].item() / len(x))
            for c in range(CLASSES)
        ],
        axis=1,
    )
    difference = logits.numpy() - expected
    np.testing.assert_allclose(difference, difference[:, :1].repeat(CLASSES, 1), atol=1e-6)


def test_shrinking_keeps_the_trace_and_ends_at_the_identity() -> None:
    x, y = examples(80)
    covariance = within_scatter(*sums(x, y)) / len(x)
    half = shrink(covariance, 0.5)
    assert half.trace() == pytest.approx(covariance.trace())
    torch.testing.assert_close(half.diagonal().mean() * 2, covariance.diagonal().mean() * 2)
    whole = shrink(covariance, 1.0)
    torch.testing.assert_close(whole, torch.eye(SIZE).double() * covariance.trace() / SIZE)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(0, 1000))
def test_sums_of_parts_are_those_of_the_whole_in_any_order(parts: int, seed: int) -> None:
    x, y = examples(48, seed)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(seed))
    pieces = [sums(x[rows], y[rows]) for rows in order.tensor_split(parts)]
    for one, whole in zip(map(sum, zip(*pieces, strict=True)), sums(x, y), strict=True):
        torch.testing.assert_close(one, whole, atol=1e-9, rtol=1e-9)
