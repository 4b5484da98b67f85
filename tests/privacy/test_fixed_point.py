"""Fixed-point sums: exact, without overflow, and only of values that fit."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.privacy.secagg.layout import FixedPoint

GRIDS = st.builds(
    FixedPoint,
    st.sampled_from([32, 64]),
    precision=st.integers(0, 30),
    clients=st.integers(1, 2000),
)


@settings(max_examples=80, deadline=None)
@given(fixed_point=GRIDS, shares=st.lists(st.floats(-1, 1), min_size=1, max_size=20))
def test_a_sum_is_exact_for_rounded_values(fixed_point: FixedPoint, shares: list[float]) -> None:
    """Compared with fractions; values go up to the limit, for the largest number of clients."""
    values = [share * fixed_point.limit for share in shares[: fixed_point.clients]]
    total = fixed_point.zeros(1)
    for value in values:
        total += fixed_point.encode(np.array([value]))
    exact = sum((Fraction(value) for value in values), Fraction())
    # a double holds 53 bits, of which a value near the limit of 64 bits needs all
    room = (
        len(values) * (fixed_point.step / 2 + fixed_point.limit * 2**-52)
        + abs(float(exact)) * 2**-52
    )
    assert abs(fixed_point.decode(total)[0] - float(exact)) <= room


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("clients", [1, 3, 50, 1000])
def test_the_largest_values_of_all_clients_do_not_overflow(bits: int, clients: int) -> None:
    fixed_point = FixedPoint(bits, 10, clients)
    for sign in (1.0, -1.0):
        total = sum(
            (fixed_point.encode(np.array([sign * fixed_point.limit])) for _ in range(clients)),
            fixed_point.zeros(1),
        )
        assert sign * fixed_point.decode(total)[0] == pytest.approx(
            clients * fixed_point.limit, rel=1e-6
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_do_not_fit(bad: float) -> None:
    fixed_point = FixedPoint(64, 30, 5)
    assert not fixed_point.fits(np.array([0.0, bad]))
    with pytest.raises(ValueError, match="outside"):
        fixed_point.encode(np.array([bad]))


def test_values_above_the_limit_do_not_fit() -> None:
    fixed_point = FixedPoint(32, 16, 10)
    assert fixed_point.limit == pytest.approx(2**15 / 10, rel=1e-4)
    assert fixed_point.fits(np.array([fixed_point.limit]))
    assert not fixed_point.fits(np.array([fixed_point.limit * 1.001]))


def test_other_numbers_of_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bits"):
        FixedPoint(16, 4, 3)
