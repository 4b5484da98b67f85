"""Gaussians of classes with independent coordinates, and what those of many parties make.

Class c of party l has the mean mu_lc and the biased variance sigma_lc^2 of its rows. The Gaussian
of the mixture in which party l counts omega_l needs nothing but weighted sums over the parties:
    sum omega_l a_lc,   sum omega_l a_lc mu_lc,   sum omega_l a_lc (mu_lc^2 + sigma_lc^2),
a_lc = 1 where party l has the class, else 0 (PIP, eqs. 14 and 15).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.core.trees import Tensors


@dataclass(frozen=True)
class Gaussians:
    """One Gaussian a class: rows of classes that are not there are zero."""

    there: Tensor
    """float [classes]: 1 where the class is there."""
    mean: Tensor
    """[classes, D]"""
    variance: Tensor
    """[classes, D]"""

    @classmethod
    def none(cls, classes: int, size: int, device: torch.device | str | None = None) -> Gaussians:
        """No class is there."""
        zero = torch.zeros(classes, size, device=device)
        return cls(zero[:, 0].clone(), zero, zero.clone())

    @classmethod
    def of(cls, rows: Tensor, labels: Tensor, classes: int) -> Gaussians:
        """The mean and the biased variance of each class's rows, in double precision inside.

        A class of a single row has the variance 0, where the unbiased one would not exist.
        """
        wide = rows.double()
        member = torch.nn.functional.one_hot(labels, classes).to(wide.dtype)
        count = member.sum(0).clamp(min=1).unsqueeze(1)
        mean = member.T @ wide / count
        variance = member.T @ (wide - mean[labels]).square() / count
        there = member.amax(0) if len(rows) else wide.new_zeros(classes)
        return cls(there.to(rows.dtype), mean.to(rows.dtype), variance.to(rows.dtype))

    def summands(self, spread: bool = True) -> Tensors:
        """What a party adds to the weighted sums; without `spread` the means alone."""
        present = self.there.unsqueeze(1)
        found = {"there": self.there, "mean": present * self.mean}
        if spread:
            found["square"] = present * (self.mean.square() + self.variance)
        return found

    @classmethod
    def merged(cls, totals: Tensors) -> Gaussians:
        """The Gaussians of the mixture from the weighted sums of all parties' summands.

        The variance is a difference, so rounding may bring it below zero: it is cut off there.
        """
        weight = totals["there"].unsqueeze(1)
        there = (weight > 0).to(weight.dtype)
        share = there / weight.where(weight > 0, torch.ones_like(weight))
        mean = totals["mean"] * share
        square = totals["square"] * share if "square" in totals else mean.square()
        return cls(there.squeeze(1), mean, (square - mean.square()).clamp(min=0))

    def or_else(self, other: Gaussians) -> Gaussians:
        """These, and the other's for classes that are not there."""
        mine = self.there.unsqueeze(1) > 0
        return Gaussians(
            torch.maximum(self.there, other.there),
            torch.where(mine, self.mean, other.mean),
            torch.where(mine, self.variance, other.variance),
        )

    def tree(self) -> Tensors:
        """As tensors by name."""
        return {"there": self.there, "mean": self.mean, "variance": self.variance}


def drawn_around(
    gaussians: Gaussians, copies: int, both_sides: bool, generator: torch.Generator
) -> Tensor:
    """{mu} and `copies` points mu + beta sigma, beta ~ U(0, 1) a coordinate (PIP, eq. 11).

    [1 + copies, classes, D]. With both_sides every second point is mu - beta sigma.
    """
    mean, deviation = gaussians.mean, gaussians.variance.sqrt()
    beta = torch.rand(copies, *mean.shape, generator=generator).to(mean)
    if both_sides:
        beta[1::2] *= -1
    return torch.cat([mean.unsqueeze(0), mean + beta * deviation])
