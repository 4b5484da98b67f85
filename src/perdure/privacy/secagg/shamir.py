"""Shamir's secret sharing over a prime field: any t shares give the secret, t - 1 give nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

PRIME = 2**256 + 297
"""The smallest prime above 2^256: every secret of 32 bytes is a field element as it is."""
SECRET_BYTES = 32
SHARE_BYTES = 33


def share(
    secret: bytes, points: Sequence[int], threshold: int, coefficient: Callable[[int], int]
) -> dict[int, bytes]:
    """One share for each point (distinct, not zero).

    `coefficient(k)` is the random coefficient of x^k; it must be uniform in the field, or nearly.
    """
    _check(points, threshold)
    rest = [coefficient(k) % PRIME for k in range(threshold - 1, 0, -1)]
    polynomial = [*rest, int.from_bytes(secret, "little")]
    return {x: _evaluate(polynomial, x).to_bytes(SHARE_BYTES, "little") for x in points}


def _check(points: Sequence[int], threshold: int) -> None:
    distinct = len(set(points)) == len(points) and all(0 < x < PRIME for x in points)
    if not distinct or not 1 <= threshold <= len(points):
        raise ValueError(f"{threshold} of the points {list(points)} cannot share a secret")


def _evaluate(polynomial: Sequence[int], x: int) -> int:
    """Horner's rule, highest coefficient first."""
    value = 0
    for coefficient in polynomial:
        value = (value * x + coefficient) % PRIME
    return value


def weights_at_zero(points: Sequence[int]) -> dict[int, int]:
    """Lagrange's weights, by which shares at these points add up to the secret."""
    found = {}
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        found[x] = above * pow(below, -1, PRIME) % PRIME
    return found


def combine(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes | None:
    """The secret from the shares at the points of `weights`; None if they are not of one secret."""
    terms = (weights[x] * int.from_bytes(shares[x], "little") for x in weights)
    secret = sum(terms) % PRIME
    return secret.to_bytes(SECRET_BYTES, "little") if secret < 256**SECRET_BYTES else None
