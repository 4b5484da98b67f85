"""The Gaussian mechanism on a sum over clients: clipping, and the noise that each client adds."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clip_norm(matrix: Tensor, limit: float) -> Tensor:
    """Return the matrix, scaled down to a Frobenius norm of at most `limit`."""
    norm = torch.linalg.vector_norm(matrix)
    factor: Tensor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
    return matrix * factor


def fot_sigma(epsilon: float, delta: float, clients: int) -> float:
    """Return the noise of one client as FOT's appendix H prints it.

    sigma^2 = log(1.25 / delta) / (epsilon^2 C) for C clients.
    """
    return math.sqrt(math.log(1.25 / delta) / clients) / epsilon


def gaussian_sigma(epsilon: float, delta: float, clients: int, sensitivity: float) -> float:
    """Return the noise of one client with which the sum over C clients is (epsilon, delta)-private.

    sigma_sum = sensitivity * sqrt(2 log(1.25 / delta)) / epsilon (Dwork and Roth 2014, theorem A.1,
    proved for epsilon < 1), divided by sqrt(C) because independent noises add up in variance.

    Args:
        epsilon: Privacy loss of one sum.
        delta: Probability with which the loss may be larger.
        clients: Number of clients C that add noise.
        sensitivity: Largest norm of one client's summand.
    """
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta) / clients) / epsilon
