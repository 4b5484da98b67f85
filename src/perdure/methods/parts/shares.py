"""The share rho of a layer's inputs that lies outside its protected space (FOT, eq. 12)."""

from __future__ import annotations

import torch
from torch import Tensor


def outside_norms(outside: Tensor, inputs: Tensor, squared: bool) -> Tensor:
    """Return one client's term: ||X*|| / ||X||, to be averaged; or both squared, to be summed."""
    norms = torch.stack([outside.double().norm(), inputs.double().norm()])
    if squared:
        return norms.square()
    return (norms[0] / norms[1].clamp(min=1e-30)).float()


def outside_fraction(share: Tensor) -> float:
    """Return rho of all clients from the mean of their terms."""
    rho = share[0] / share[1].clamp(min=1e-30) if share.dim() else share
    return min(1.0, max(0.0, float(rho)))
