"""Singular values of a matrix with Gaussian noise: which of them are signal, and how large it is.

The singular values of an m x n matrix of independent N(0, sigma^2) end at sigma (sqrt m + sqrt n)
(Bai and Yin 1988). A larger one belongs to a signal; below, noise and signal look alike, and the
directions are those of the noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_QUANTILE = 3.27
"""Of the Tracy-Widom law of real matrices: the largest value of noise exceeds it once in 1,000."""


def noise_edge(rows: int, columns: int, sigma: float) -> float:
    """Return the singular value that a matrix of noise alone exceeds once in 1,000 draws.

    It is sigma (sqrt m + sqrt n), and a margin for the spread of the largest value about it
    (Johnstone 2001), which vanishes for large matrices.

    Args:
        rows: m, at least 1.
        columns: n, at least 1.
        sigma: Standard deviation of the noise on each entry.
    """
    m, n = math.sqrt(rows), math.sqrt(columns)
    spread = (m + n) * (1 / m + 1 / n) ** (1 / 3)
    return sigma * math.sqrt((m + n) ** 2 + _QUANTILE * spread)


def signal_values(singular: Tensor, rows: int, columns: int, sigma: float) -> Tensor:
    """Return the singular values of the signal: 0 below the noise's edge, smaller ones above it.

    A singular value x of the signal appears in the sum as y with
        y^2 = (x^2 + sigma^2 m) (x^2 + sigma^2 n) / x^2
    (Benaych-Georges and Nadakuditi 2012), which is solved for x.

    Args:
        singular: Singular values y of signal and noise together, float [r].
        rows: m.
        columns: n.
        sigma: Standard deviation of the noise on each entry. 0: nothing is changed.
    """
    if not sigma or not len(singular):
        return singular
    squares = singular.double().square() - sigma**2 * (rows + columns)
    root = (squares.square() - 4 * sigma**4 * rows * columns).clamp(min=0).sqrt()
    is_signal = singular > noise_edge(rows, columns, sigma)
    return torch.where(is_signal, ((squares + root) / 2).clamp(min=0).sqrt(), 0.0)


def signal_energy(singular: Tensor, rows: int, columns: int, sigma: float) -> float:
    """Return an estimate of the signal's squared norm, from the squared norm of the sum.

    It is at least that of the `signal_values`, which the sum's may be below by chance.

    Args:
        singular: Singular values of signal and noise together, float [r].
        rows: m.
        columns: n.
        sigma: Standard deviation of the noise on each entry.
    """
    total = float(singular.double().square().sum()) - sigma**2 * rows * columns
    return max(total, float(signal_values(singular, rows, columns, sigma).square().sum()))
