"""Rank rules against loops that follow their definitions, and hand-computed cases."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.algebra.subspaces import count_significant, energy_rank, mass_rank, uncovered_rank

values = st.lists(st.floats(0.01, 10), min_size=1, max_size=12).map(
    lambda x: np.sort(np.array(x))[::-1].copy()
)
thresholds = st.floats(0.05, 0.99)


@given(values, thresholds, st.floats(0.01, 1))
def test_uncovered_rank_follows_its_definition(s: np.ndarray, threshold: float, rho: float) -> None:
    rank = uncovered_rank(torch.tensor(s), threshold, rho)
    if rho <= 1 - threshold:
        assert rank == 0
        return
    fractions = [np.sum(s[:r] ** 2) / np.sum(s**2) for r in range(len(s) + 1)]
    expected = next(
        r for r, fraction in enumerate(fractions) if (1 - rho) + rho * fraction > threshold
    )
    assert abs(rank - expected) <= (abs((1 - rho) + rho * fractions[expected] - threshold) < 1e-9)


def test_uncovered_rank_equals_values_by_hand() -> None:
    """The squared fractions of (3, 2, 1) are 9/14, 13/14, 1."""
    s = torch.tensor([3.0, 2.0, 1.0])
    assert uncovered_rank(s, 0.60, 1.0) == 1
    assert uncovered_rank(s, 0.65, 1.0) == 2
    assert uncovered_rank(s, 0.95, 1.0) == 3
    # half is covered already: 0.9 needs a fraction of 0.8 of the rest, 0.81 needs 0.62
    assert uncovered_rank(s, 0.9, 0.5) == 2
    assert uncovered_rank(s, 0.81, 0.5) == 1
    assert uncovered_rank(s, 0.5, 0.5) == 0
    assert uncovered_rank(torch.tensor([3.0, 2.0, 1e-9]), 1.0, 1.0) == 2


@given(values, thresholds)
def test_mass_rank_follows_its_definition(s: np.ndarray, threshold: float) -> None:
    rank = mass_rank(torch.tensor(s), threshold)
    assert np.sum(s[:rank]) / np.sum(s) >= threshold - 1e-9
    assert np.sum(s[: rank - 1]) / np.sum(s) < threshold + 1e-9


@given(values, thresholds, st.floats(1, 4))
def test_energy_rank_follows_its_definition(s: np.ndarray, threshold: float, factor: float) -> None:
    total = float(np.sum(s**2) * factor)
    rank = energy_rank(torch.tensor(s), threshold, total)
    covered = 1 - np.sum(s**2) / total
    assert covered + np.sum(s[:rank] ** 2) / total >= threshold - 1e-9
    assert rank == 0 or covered + np.sum(s[: rank - 1] ** 2) / total < threshold + 1e-9


def test_zeros_and_covered_inputs_have_rank_0() -> None:
    assert energy_rank(torch.tensor([1.0]), 0.5, 4.0) == 0  # three quarters are covered
    assert energy_rank(torch.zeros(3), 0.9, 0.0) == 0
    assert mass_rank(torch.zeros(3), 0.9) == 0
    assert mass_rank(torch.tensor([2.0, 1.0, 1.0]), 0.5) == 1
    assert count_significant(torch.tensor([1.0, 1e-3, 1e-9])) == 2
    assert count_significant(torch.zeros(0)) == 0
