"""Sums over examples from which classifiers follow in closed form.

Every statistic here is a sum over rows, so that those of clients, and of tasks, add up to those of
all their rows together, whatever their order:

    count_c = sum 1,   total_c = sum f,   gram = sum f f^T   (rows f of class c; gram over all rows)

Nearest class mean, linear discriminant analysis and ridge regression need nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


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
