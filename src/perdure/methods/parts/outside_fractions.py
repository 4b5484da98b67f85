"""The fraction of layer inputs outside a protected subspace (FOT, eq. 12)."""

from __future__ import annotations

import torch
from torch import Tensor


def outside_norms(outside: Tensor, inputs: Tensor, squared: bool) -> Tensor:
    """Return one client's term of rho, the fraction of inputs X outside O (eq. 12).

    Args:
        outside: X*, the inputs after projecting out O, as columns.
        inputs: X, the inputs as columns.
        squared: Whether to return both squared norms [2], to be summed over clients, instead of the
            ratio ||X*|| / ||X||, to be averaged.
    """
    norms = torch.stack([outside.double().norm(), inputs.double().norm()])
    if squared:
        return norms.square()
    return (norms[0] / norms[1].clamp(min=1e-30)).float()


def outside_fraction(mean: Tensor) -> float:
    """Return rho of all clients, in [0, 1], from the mean of their `outside_norms`."""
    rho = mean[0] / mean[1].clamp(min=1e-30) if mean.dim() else mean
    return min(1.0, max(0.0, float(rho)))
