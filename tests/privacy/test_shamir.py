"""Shamir's sharing against a linear system over integers, and the secrecy of too few shares."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.privacy.secagg.keys import PRIME, combine_shares, split_secret, weights_at_zero


def solve(rows: list[tuple[int, int]]) -> list[int]:
    """Return the coefficients of the polynomial through these points, by Gaussian elimination."""
    size = len(rows)
    system = [[pow(x, k, PRIME) for k in range(size)] + [y] for x, y in rows]
    for k in range(size):
        pivot = next(row for row in range(k, size) if system[row][k])
        system[k], system[pivot] = system[pivot], system[k]
        inverse = pow(system[k][k], PRIME - 2, PRIME)
        system[k] = [value * inverse % PRIME for value in system[k]]
        for row in range(size):
            if row != k:
                factor = system[row][k]
                system[row] = [
                    (a - factor * b) % PRIME for a, b in zip(system[row], system[k], strict=True)
                ]
    return [row[-1] for row in system]


def number(text: bytes) -> int:
    return int.from_bytes(text, "little")


def test_the_modulus_is_prime() -> None:
    assert sympy.isprime(PRIME)
    assert PRIME > 2**256


@settings(max_examples=30, deadline=None)
@given(
    secret=st.binary(min_size=32, max_size=32),
    clients=st.integers(2, 9),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_any_t_shares_give_the_secret(
    secret: bytes, clients: int, data: st.DataObject, seed: int
) -> None:
    threshold = data.draw(st.integers(1, clients))
    chosen = sorted(data.draw(st.permutations(range(1, clients + 1)))[:threshold])
    source = random.Random(seed)
    coefficients = {k: source.randrange(PRIME) for k in range(1, threshold)}
    shares = split_secret(secret, range(1, clients + 1), threshold, coefficients.__getitem__)
    assert combine_shares(shares, weights_at_zero(chosen)) == secret
    solved = solve([(x, number(shares[x])) for x in chosen])
    assert solved == [number(secret), *(coefficients[k] for k in range(1, threshold))]


def test_fewer_shares_are_consistent_with_every_secret() -> None:
    """For any two of three needed shares there is a polynomial with any other secret."""
    shares = split_secret(bytes(range(32)), range(1, 6), 3, lambda k: 12345 * k)
    for pair in combinations(range(1, 6), 2):
        for other in (0, 1, 2**200):
            points = [(0, other), *((x, number(shares[x])) for x in pair)]
            assert solve(points)[0] == other


def test_shares_of_different_secrets_are_detected() -> None:
    shares = split_secret(bytes(32), range(1, 6), 3, lambda k: 99 * k)
    shares[2] = bytes([shares[2][0] ^ 1]) + shares[2][1:]
    assert combine_shares(shares, weights_at_zero([1, 2, 3])) != bytes(32)


@pytest.mark.parametrize(("points", "threshold"), [([1, 1], 1), ([0, 1], 1), ([1, 2], 3), ([1], 0)])
def test_impossible_sharings_are_refused(points: list[int], threshold: int) -> None:
    with pytest.raises(ValueError, match="cannot share"):
        split_secret(bytes(32), points, threshold, lambda k: k)
