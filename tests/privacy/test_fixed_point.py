"""Fixed-point sums: exact, never overflowing, and refusing what does not fit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.privacy.secagg.fixed_point import FixedPoint

GRIDS = st.builds(
    FixedPoint,
    st.sampled_from([32, 64]),
    precision=st.integers(0, 30),
    clients=st.integers(1, 2000),
)


@settings(max_examples=80, deadline=None)
@given(grid=GRIDS, shares=st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_a_sum_is_exact_for_rounded_values(grid: FixedPoint, shares: list[float]) -> None:
    """Against fractions; values go up to the limit, as many as the grid is for."""
    values = [share * grid.limit for share in shares[: grid.clients]]
    total = grid.zeros(1)
    for value in values:
        total += grid.encode(np.array([value]))
    exact = sum((Fraction(value) for value in values), Fraction())
    # a double holds 53 bits, of which a value near the limit of 64 bits needs all
    room = len(values) * (grid.step / 2 + grid.limit * 2**-52) + abs(float(exact)) * 2**-52
    assert abs(grid.decode(total)[0] - float(exact)) <= room


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("clients", [1, 3, 50, 1000])
def test_the_largest_values_of_all_clients_do_not_overflow(bits: int, clients: int) -> None:
    grid = FixedPoint(bits, 10, clients)
    for sign in (1.0, -1.0):
        total = sum(
            (grid.encode(np.array([sign * grid.limit])) for _ in range(clients)), grid.zeros(1)
        )
        assert sign * grid.decode(total)[0] == pytest.approx(clients * grid.limit, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_fit(bad: float) -> None:
    grid = FixedPoint(64, 30, 5)
    assert not grid.fits(np.array([0.0, bad]))
    with pytest.raises(ValueError, match="outside"):
        grid.encode(np.array([bad]))


def test_what_is_too_large_does_not_fit() -> None:
    grid = FixedPoint(32, 16, 10)
    assert grid.limit == pytest.approx(2**15 / 10, rel=1e-4)
    assert grid.fits(np.array([grid.limit]))
    assert not grid.fits(np.array([grid.limit * 1.001]))


def test_other_rings_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        FixedPoint(16, 4, 3)
