"""Gaussians of classes with independent coordinates, and their mixtures over clients.

Class c of client l has the mean mu_lc and the biased variance sigma_lc^2 of its rows. The Gaussian
of the mixture in which client l has weight omega_l needs only weighted sums over the clients:
    sum omega_l a_lc,   sum omega_l a_lc mu_lc,   sum omega_l a_lc (mu_lc^2 + sigma_lc^2),
with a_lc = 1 if client l has the class, else 0 (PIP, eqs. 14 and 15).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.core.trees import Tensors


@dataclass(frozen=True)
class Gaussians:
    """One Gaussian per class. Classes without examples are zero and marked as missing."""

    there: Tensor
    """1 for a class with examples, 0 for a missing one, float [classes]."""
    mean: Tensor
    """Mean of each class, float [classes, D]."""
    variance: Tensor
    """Biased variance of each coordinate, float [classes, D]."""

    @classmethod
    def empty(cls, classes: int, size: int, device: torch.device | str | None = None) -> Gaussians:
        """Return Gaussians of `size` coordinates in which every class is missing."""
        zero = torch.zeros(classes, size, device=device)
        return cls(zero[:, 0].clone(), zero, zero.clone())

    @classmethod
    def of(cls, rows: Tensor, labels: Tensor, classes: int) -> Gaussians:
        """Return the mean and the biased variance of each class, computed in double precision.

        A class with a single row has the variance 0; its unbiased variance would not exist.

        Args:
            rows: Examples, float [N, D].
            labels: Class of each example, int64 [N].
            classes: Number of classes.
        """
        wide = rows.double()
        member = torch.nn.functional.one_hot(labels, classes).to(wide.dtype)
        count = member.sum(0).clamp(min=1).unsqueeze(1)
        mean = member.T @ wide / count
        variance = member.T @ (wide - mean[labels]).square() / count
        present = member.amax(0) if len(rows) else wide.new_zeros(classes)
        return cls(present.to(rows.dtype), mean.to(rows.dtype), variance.to(rows.dtype))

    def summands(self, with_variance: bool = True) -> Tensors:
        """Return one client's summands of the weighted sums, for `from_sums`.

        Args:
            with_variance: Include squares, from which the mixture's variance is computed.
        """
        present = self.there.unsqueeze(1)
        summands = {"there": self.there, "mean": present * self.mean}
        if with_variance:
            summands["square"] = present * (self.mean.square() + self.variance)
        return summands

    @classmethod
    def from_sums(cls, totals: Tensors) -> Gaussians:
        """Return the Gaussians of the mixture from the weighted sums of all clients' summands.

        The variance is a difference that rounding may bring below zero; it is clamped to 0.
        """
        weight = totals["there"].unsqueeze(1)
        present = (weight > 0).to(weight.dtype)
        scale = present / weight.where(weight > 0, torch.ones_like(weight))
        mean = totals["mean"] * scale
        square = totals["square"] * scale if "square" in totals else mean.square()
        return cls(present.squeeze(1), mean, (square - mean.square()).clamp(min=0))

    def fill_missing(self, other: Gaussians) -> Gaussians:
        """Return a copy in which missing classes have the Gaussians of `other`."""
        present = self.there.unsqueeze(1) > 0
        return Gaussians(
            torch.maximum(self.there, other.there),
            torch.where(present, self.mean, other.mean),
            torch.where(present, self.variance, other.variance),
        )

    def tree(self) -> Tensors:
        """Return the fields by name."""
        return {"there": self.there, "mean": self.mean, "variance": self.variance}


def draw_around(
    gaussians: Gaussians, copies: int, both_sides: bool, generator: torch.Generator
) -> Tensor:
    """Return {mu} and `copies` points mu + beta sigma, with beta ~ U(0, 1) per coordinate.

    This is PIP's eq. 11.

    Args:
        gaussians: One Gaussian per class.
        copies: Points per class besides its mean.
        both_sides: Make every second point mu - beta sigma.
        generator: CPU generator of beta.

    Returns:
        The points, float [1 + copies, classes, D].
    """
    mean, deviation = gaussians.mean, gaussians.variance.sqrt()
    beta = torch.rand(copies, *mean.shape, generator=generator).to(mean)
    if both_sides:
        beta[1::2] *= -1
    return torch.cat([mean.unsqueeze(0), mean + beta * deviation])
