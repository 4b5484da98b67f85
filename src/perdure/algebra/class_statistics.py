"""Sums and Gaussians of classes, from which classifiers follow in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.core.trees import Tensors

# ---- Sums over examples from which classifiers follow in closed form
#
# Every statistic here is a sum over rows, so that those of clients, and of tasks, add up to those
# of all their rows together, whatever their order:
#
#     count_c = sum 1,  total_c = sum f,  gram = sum f f^T   (rows f of class c; gram of all rows)
#
# Nearest class mean, linear discriminant analysis and ridge regression need nothing else.


class LinearHead(NamedTuple):
    """A linear classifier: logits = x weight^T + bias."""

    weight: Tensor
    """double [classes, D]"""
    bias: Tensor
    """double [classes]"""

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of rows [n, D] as double [n, classes]."""
        return rows.double() @ self.weight.T + self.bias


def class_totals(rows: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Count the rows of each class and add them up.

    Args:
        rows: Float [n, D].
        labels: int64 [n]; or numbers y, float [n], which count as two classes of which a row
            belongs to the first by y and to the second by 1 - y.
        classes: Number of classes.

    Returns:
        Counts, double [classes], and totals, double [classes, D].

    """
    if labels.is_floating_point():
        member = torch.stack([labels, 1 - labels], 1).double()
    else:
        member = F.one_hot(labels, classes).double()
    return member.sum(0), member.T @ rows.double()


def class_means(count: Tensor, total: Tensor) -> Tensor:
    """Return the mean of each class, [classes, D]; zeros for classes without rows."""
    return total / count.clamp(min=1).unsqueeze(1)


def within_scatter(count: Tensor, total: Tensor, gram: Tensor) -> Tensor:
    """Return sum_c sum_{f of c} (f - mean_c)(f - mean_c)^T, [D, D]."""
    means = class_means(count, total)
    return gram - (means * count.unsqueeze(1)).T @ means


def shrink(covariance: Tensor, amount: float, variance: Tensor | None = None) -> Tensor:
    """Move a covariance towards a multiple of the identity.

    Args:
        covariance: [..., D, D].
        amount: Fraction of the way.
        variance: The multiple, a scalar. If None, that of the same trace for each covariance.

    """
    size = covariance.shape[-1]
    if variance is None:
        variance = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    target = variance.clamp(min=1e-12) * torch.eye(size).to(covariance)
    return (1 - amount) * covariance + amount * target


MISSING = -1e9
"""Logit of a class without rows, which is never predicted."""


def nearest_mean_head(means: Tensor, count: Tensor | None = None) -> LinearHead:
    """Return the linear head that orders classes by the distance of a row to their means.

    Args:
        means: [classes, D].
        count: Rows of each class, [classes]. If None, every class has some.

    """
    bias = -means.square().sum(1)
    bias = bias if count is None else bias.masked_fill(count == 0, MISSING)
    return LinearHead(2 * means, bias)


def discriminant_head(count: Tensor, means: Tensor, covariance: Tensor) -> LinearHead:
    """Return the head of linear discriminant analysis: Gaussian classes of one covariance.

    Args:
        count: Rows of each class, [classes]: the prior probabilities are proportional to it.
        means: [classes, D].
        covariance: Positive definite [D, D].

    """
    weight = torch.linalg.solve(covariance, means.T).T
    prior = (count / count.sum()).clamp(min=1e-12).log()
    return LinearHead(weight, prior - (weight * means).sum(1) / 2)


def ridge_head(count: Tensor, total: Tensor, gram: Tensor, strength: float) -> LinearHead:
    """Return the head of ridge regression on one-hot targets, with an unpenalized intercept.

    It minimizes sum |W f + b - y|^2 + strength |W|^2 over all rows.

    Args:
        count: Rows of each class, [classes].
        total: Sum of each class's rows, [classes, D].
        gram: Sum of f f^T over all rows, [D, D].
        strength: Weight of the penalty.

    """
    rows = count.sum()
    mean_row, mean_target = total.sum(0) / rows, count / rows
    centered = gram - rows * torch.outer(mean_row, mean_row)
    cross = total.T - rows * torch.outer(mean_row, mean_target)
    penalized = centered + strength * torch.eye(len(gram)).to(gram)
    weight = torch.linalg.solve(penalized, cross).T
    return LinearHead(weight, mean_target - weight @ mean_row)


def quadratic_logits(rows: Tensor, count: Tensor, means: Tensor, covariances: Tensor) -> Tensor:
    """Return the log-densities of Gaussian classes plus their log prior, double [n, classes].

    The constant of the densities, which is the same for all classes, is left out.

    Args:
        rows: Float [n, D].
        count: Rows of each class, [classes].
        means: [classes, D].
        covariances: Positive definite [classes, D, D].

    """
    factors = torch.linalg.cholesky(covariances)
    log_volume: Tensor = factors.diagonal(dim1=1, dim2=2).log().sum(1)
    prior = (count / count.sum()).clamp(min=1e-12).log()
    return prior - log_volume - squared_distances(rows, means, factors) / 2


def squared_distances(rows: Tensor, means: Tensor, factors: Tensor) -> Tensor:
    """Return (f - m)^T C^-1 (f - m) of rows f to Gaussian classes, double [n, classes].

    Args:
        rows: Float [n, D].
        means: m, [classes, D].
        factors: Cholesky factors of the covariances C, [classes, D, D].

    """
    gaps = rows.double().unsqueeze(0) - means.unsqueeze(1)  # [classes, n, D]
    scaled = torch.linalg.solve_triangular(factors, gaps.transpose(1, 2), upper=False)
    distances: Tensor = scaled.square().sum(1).T
    return distances


# ---- Gaussians of classes with independent coordinates, and their mixtures over clients
#
# Class c of client l has mean mu_lc and biased variance sigma_lc^2 of its rows. The Gaussian
# of the mixture in which client l has weight omega_l needs only weighted sums over the clients:
#     sum omega_l a_lc,   sum omega_l a_lc mu_lc,   sum omega_l a_lc (mu_lc^2 + sigma_lc^2),
# with a_lc = 1 if client l has the class, else 0 (PIP, eqs. 14 and 15).


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
        """Return one client's summands of the weighted sums, for `from_sums`."""
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

    Returns:
        The points, float [1 + copies, classes, D].

    """
    mean, deviation = gaussians.mean, gaussians.variance.sqrt()
    beta = torch.rand(copies, *mean.shape, generator=generator).to(mean)
    if both_sides:
        beta[1::2] *= -1
    return torch.cat([mean.unsqueeze(0), mean + beta * deviation])
