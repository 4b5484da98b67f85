"""Robust means against ByzFL, numpy and scipy; the cap of weights against its definition."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.algebra import robust

SIZES = [(1, 3), (2, 5), (7, 40), (20, 33), (3, (1 << 14) + 5)]


def rows(clients, values, seed=0):
    return torch.randn(clients, values, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def byzfl():
    """Return ByzFL's aggregators; the package itself would import torchvision."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("byzfl is not installed: pip install --no-deps byzfl")
    package = types.ModuleType("byzfl")
    package.__path__ = list(spec.submodule_search_locations or ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "byzfl", package)
        yield importlib.import_module("byzfl.aggregators")
        for name in [name for name in sys.modules if name.startswith("byzfl.")]:
            del sys.modules[name]


@pytest.mark.parametrize(("clients", "values"), SIZES)
def test_the_median_is_that_of_byzfl_and_numpy(byzfl, clients, values):
    x = rows(clients, values)
    found = robust.median(x)
    torch.testing.assert_close(found, byzfl.Median()(x))
    np.testing.assert_allclose(found, np.median(x.numpy(), axis=0), rtol=1e-6)


@pytest.mark.parametrize(("clients", "values"), SIZES)
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.3, 0.45])
def test_the_trimmed_mean_is_that_of_byzfl_and_scipy(byzfl, clients, values, fraction):
    x = rows(clients, values)
    found = robust.trimmed_mean(x, fraction)
    torch.testing.assert_close(found, byzfl.TrMean(int(fraction * clients))(x))
    expected = scipy.stats.trim_mean(x.double().numpy(), fraction, axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bound", [0.5, 4.0, 100.0])
def test_bounded_norms_are_those_of_byzfl(byzfl, bound):
    x = rows(9, 30) * torch.arange(1, 10)[:, None]
    factors = robust.bounding_factors(robust.row_norms([x]), bound)
    expected = byzfl.Average()(byzfl.Clipping(bound)(x.clone()))
    torch.testing.assert_close(robust.scaled_mean(x, factors), expected)


def test_the_rules_without_byzfl():
    x = rows(11, 17).double()
    np.testing.assert_allclose(robust.median(x), np.median(x.numpy(), axis=0))
    expected = scipy.stats.trim_mean(x.numpy(), 0.2, axis=0)
    np.testing.assert_allclose(robust.trimmed_mean(x, 0.2), expected)
    factors = robust.bounding_factors(robust.row_norms([x]))
    norms = np.linalg.norm(x.numpy(), axis=1)
    clipped = x.numpy() * np.minimum(1, np.median(norms) / norms)[:, None]
    np.testing.assert_allclose(robust.scaled_mean(x, factors), clipped.mean(0))


def test_the_norm_is_over_all_parts():
    x = rows(5, 12)
    norms = robust.row_norms([x[:, :5], x[:, 5:]])
    np.testing.assert_allclose(norms, np.linalg.norm(x.numpy(), axis=1), rtol=1e-6)


def test_rows_of_zeros_and_of_the_largest_float_stay_finite():
    x = rows(5, 100)
    x[0], x[1] = 0.0, 3e38
    factors = robust.bounding_factors(robust.row_norms([x]))
    assert torch.isfinite(robust.scaled_mean(x, factors)).all()
    assert robust.scaled_mean(x, factors).norm() <= x[2:].norm(dim=1).max()


@pytest.mark.parametrize("rule", [robust.median, lambda x: robust.trimmed_mean(x, 0.4)])
def test_a_minority_moves_no_value_beyond_the_others(rule):
    """40 % of the rows are hostile: every value stays within the range of the honest ones."""
    x = rows(10, 50)
    x[:4] = 1e30 * torch.sign(rows(4, 50, seed=1))
    found = rule(x)
    assert (found <= x[4:].max(0).values).all()
    assert (found >= x[4:].min(0).values).all()


@pytest.mark.parametrize(
    ("count", "fraction", "cut"), [(100, 0.29, 29), (20, 0.3, 6), (4, 0.2, 0), (1, 0.4, 0)]
)
def test_how_many_rows_a_fraction_leaves_out(count, fraction, cut):
    assert robust.trimmed_rows(count, fraction) == cut


WEIGHTS = st.lists(st.integers(0, 10**12), min_size=1, max_size=8)
SHARES = st.floats(0.01, 1.0)


@given(WEIGHTS, SHARES)
def test_no_capped_weight_has_more_than_its_share(weights, share):
    cap = robust.weight_cap(weights, share)
    capped = [min(weight, cap) for weight in weights]
    positive = [weight for weight in weights if weight]
    if not positive:
        assert cap == math.inf
        return
    assert cap >= min(positive)
    allowed = max(share, 1 / len(positive))
    assert max(capped) <= allowed * sum(capped) * (1 + 1e-6)
    if cap < math.inf and share > 1 / len(positive):  # no smaller than it must be
        assert max(capped) >= share * sum(capped) * (1 - 1e-6)


@pytest.mark.parametrize(
    ("weights", "share", "cap"),
    [
        ([10, 10, 10], 0.5, math.inf),
        ([10, 10, 10], 1 / 3, math.inf),
        ([1, 2, 10**12], 0.5, 3.0),
        ([1, 1, 1, 7, 9], 0.25, 1.5),
        ([4, 9, 100], 0.1, 4.0),
        ([0, 5], 0.5, 5.0),
    ],
)
def test_examples_of_caps(weights, share, cap):
    assert robust.weight_cap(weights, share) == pytest.approx(cap)
