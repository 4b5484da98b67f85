"""Means and intervals against scipy and numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from perdure.report.figure_data import LEVEL, paired_difference, summarize

NUMBERS = st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=2, max_size=8)


@given(NUMBERS)
def test_mean_and_sample_deviation(values: list[float]) -> None:
    found = summarize(values)
    assert found is not None
    assert found.count == len(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)


@given(NUMBERS, NUMBERS)
def test_the_interval_is_that_of_a_paired_t_test(ours: list[float], theirs: list[float]) -> None:
    count = min(len(ours), len(theirs))
    a, b = np.array(ours[:count]), np.array(theirs[:count])
    assume(np.std(a - b) > 1e-6)
    found = paired_difference(dict(enumerate(a.tolist())), dict(enumerate(b.tolist())))
    expected = stats.ttest_rel(a, b).confidence_interval(LEVEL)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.excludes_zero == (stats.ttest_rel(a, b).pvalue < 1 - LEVEL)


def test_only_shared_seeds_are_paired() -> None:
    found = paired_difference({0: 1.0, 1: 2.0, 2: 9.0}, {1: 1.0, 0: 1.0, 7: 5.0})
    assert found is not None
    assert (found.count, found.mean) == (2, 0.5)


def test_one_seed_has_no_spread_and_no_interval() -> None:
    one, gap = summarize([0.5]), paired_difference({3: 0.5}, {3: 0.25})
    assert one is not None
    assert gap is not None
    assert one.std is None
    assert (gap.mean, gap.low, gap.high, gap.excludes_zero) == (0.25, None, None, False)


def test_nothing_is_nothing() -> None:
    assert summarize([]) is None
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
