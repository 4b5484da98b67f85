"""Shamir's secret sharing over a prime field: t shares give the secret, t - 1 reveal nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from perdure.privacy.secagg.layout import SHARE_BYTES

PRIME = 2**256 + 297
"""The smallest prime above 2^256, so that every secret of 32 bytes is a field element."""
SECRET_BYTES = 32
"""Size of a secret."""


def share(
    secret: bytes, points: Sequence[int], threshold: int, coefficient: Callable[[int], int]
) -> dict[int, bytes]:
    """Split a secret into shares."""
    _check(points, threshold)
    random_part = [coefficient(k) % PRIME for k in range(threshold - 1, 0, -1)]
    polynomial = [*random_part, int.from_bytes(secret, "little")]
    return {x: _evaluate(polynomial, x).to_bytes(SHARE_BYTES, "little") for x in points}


def _check(points: Sequence[int], threshold: int) -> None:
    distinct = len(set(points)) == len(points) and all(0 < x < PRIME for x in points)
    if not distinct or not 1 <= threshold <= len(points):
        raise ValueError(f"{threshold} of the points {list(points)} cannot share a secret")


def _evaluate(polynomial: Sequence[int], x: int) -> int:
    """Evaluate a polynomial by Horner's rule, highest coefficient first."""
    value = 0
    for coefficient in polynomial:
        value = (value * x + coefficient) % PRIME
    return value


def weights_at_zero(points: Sequence[int]) -> dict[int, int]:
    """Return the Lagrange weights with which shares at these points add up to the secret."""
    weights = {}
    for x in points:
        numerator = denominator = 1
        for other in points:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        weights[x] = numerator * pow(denominator, -1, PRIME) % PRIME
    return weights


def combine(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes | None:
    """Return the secret of shares, or None if they do not belong to one secret."""
    terms = (weights[x] * int.from_bytes(shares[x], "little") for x in weights)
    secret = sum(terms) % PRIME
    return secret.to_bytes(SECRET_BYTES, "little") if secret < 256**SECRET_BYTES else None
