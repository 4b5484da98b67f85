"""Gaussians of classes from sums over examples, joined over tasks and moved by linear maps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.class_statistics import class_means, shrink, within_scatter
from perdure.contract import Client
from perdure.contract.small_groups import in_large_class
from perdure.core.trees import Tensors


def class_sums(
    features: Tensor, labels: Tensor, outputs: int, per_class: bool, weights: Tensor | None = None
) -> Tensors:
    """Return the sums from which Gaussians follow.

    Args:
        features: double [rows, D].
        labels: int64 [rows]: output index of each row.
        outputs: Number of outputs.
        per_class: Whether each class has its own Gram matrix.
        weights: double [rows]: how many rows each row stands for. If None, 1.

    Returns:
        `count` [outputs], `total` [outputs, D] and `gram` [outputs, D, D], or [1, D, D] for all.
    """
    weights = torch.ones_like(features[:, 0]) if weights is None else weights
    member = F.one_hot(labels, outputs).double() * weights.unsqueeze(1)
    if per_class:
        rows = [(features[labels == c], member[labels == c, c]) for c in range(outputs)]
        gram = torch.stack([part.T @ (part * weight.unsqueeze(1)) for part, weight in rows])
    else:
        gram = (features.T @ (features * weights.unsqueeze(1))).unsqueeze(0)
    return {"count": member.sum(0), "total": member.T @ features, "gram": gram}


def client_features(client: Client) -> Tensor:
    """Return the features of all the client's examples of the task, double [rows, D]."""
    with torch.no_grad():
        return torch.cat([client.features(batch).double() for batch in client.data.batches()])


def client_class_sums(client: Client, per_class: bool) -> Tensors:
    """Return `class_sums` of the client's features of the task."""
    labels = client.data.targets[client.data.index]
    outputs = client.context.network.outputs.count(client.context.task)
    return class_sums(client_features(client), labels, outputs, per_class)


def stored_class_sums(client: Client, per_class: bool) -> Tensors:
    """Return `class_sums` of the features of earlier tasks' examples that the client keeps.

    Classes of which it keeps too few are left out.
    """
    outputs = client.context.network.outputs.count(client.context.task)
    size = client.context.network.feature_size
    features, labels = torch.zeros(0, size).double(), torch.zeros(0, dtype=torch.int64)
    weights = torch.zeros(0).double()
    with torch.no_grad():
        for batch in client.stored_batches():
            assert batch.weight is not None
            features = torch.cat([features, client.features(batch).double().to(features)])
            labels = torch.cat([labels, batch.y.to(labels)])
            weights = torch.cat([weights, batch.weight.to(weights)])
    large = in_large_class(labels, client.min_rows)
    return class_sums(features[large], labels[large], outputs, per_class, weights[large])


def fit_drift(old_gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """Return the matrix A, [D, D], that maps old features to new ones: F' is about F A.

    Args:
        old_gram: F^T F of the old features.
        cross: F^T F'.
        ridge: Pull towards the identity, relative to the mean of old_gram's diagonal.
    """
    pull = ridge * old_gram.diagonal().mean() * torch.eye(len(old_gram)).to(old_gram)
    matrix: Tensor = torch.linalg.solve(old_gram + pull, cross + pull)
    return matrix


@dataclass(frozen=True)
class ClassGaussians:
    """Counts, means and covariances of classes; rows of classes without examples are zero."""

    count: Tensor
    """double [outputs]"""
    mean: Tensor
    """double [outputs, D]"""
    covariance: Tensor
    """double [outputs, D, D], or [1, D, D]: one that all classes share."""

    @classmethod
    def from_sums(cls, sums: Tensors) -> ClassGaussians:
        """Return the Gaussians of `class_sums`."""
        count, total, gram = sums["count"], sums["total"], sums["gram"]
        mean = class_means(count, total)
        if len(gram) == 1:
            scatter = within_scatter(count, total, gram[0]).unsqueeze(0)
            return cls(count, mean, scatter / count.sum().clamp(min=1))
        second = gram / count.clamp(min=1)[:, None, None]
        return cls(count, mean, second - mean.unsqueeze(2) * mean.unsqueeze(1))

    def tree(self) -> Tensors:
        """Return it as tensors by name."""
        return {"count": self.count, "mean": self.mean, "covariance": self.covariance}

    @classmethod
    def read(cls, tree: Tensors) -> ClassGaussians:
        """Return the inverse of `tree`."""
        return cls(tree["count"], tree["mean"], tree["covariance"])

    def moved(self, matrix: Tensor) -> ClassGaussians:
        """Return the Gaussians of the features f A for a matrix A."""
        return ClassGaussians(self.count, self.mean @ matrix, matrix.T @ self.covariance @ matrix)

    def replaced(self, newer: ClassGaussians) -> ClassGaussians:
        """Return these, with means and covariances of `newer` for the classes that it has.

        Counts stay. A shared covariance is the one of `newer`, unless it has no class at all.
        """
        grown = len(newer.count) - len(self.count)
        mean = F.pad(self.mean, (0, 0, 0, grown))
        there = newer.count > 0
        mean = torch.where(there.unsqueeze(1), newer.mean, mean)
        if len(newer.covariance) == 1:
            covariance = newer.covariance if bool(there.any()) else self.covariance
        else:
            padded = F.pad(self.covariance, (0, 0, 0, 0, 0, grown))
            covariance = torch.where(there[:, None, None], newer.covariance, padded)
        return ClassGaussians(F.pad(self.count, (0, grown)), mean, covariance)

    def merged(self, new: ClassGaussians) -> ClassGaussians:
        """Return these and newer ones; a class in both gets the Gaussian of the mixture."""
        grown = len(new.count) - len(self.count)
        count, mean = F.pad(self.count, (0, grown)), F.pad(self.mean, (0, 0, 0, grown))
        both = count + new.count
        mixed = (count[:, None] * mean + new.count[:, None] * new.mean) / both.clamp(min=1)[:, None]
        if len(new.covariance) == 1:
            weights = count.sum(), new.count.sum()
            shared = weights[0] * self.covariance + weights[1] * new.covariance
            between = _spread(count, mean - mixed) + _spread(new.count, new.mean - mixed)
            return ClassGaussians(both, mixed, (shared + between.sum(0)) / both.sum())
        padded = F.pad(self.covariance, (0, 0, 0, 0, 0, grown))
        scatter = _spread(count, mean - mixed) + _spread(new.count, new.mean - mixed)
        scatter = (
            scatter + count[:, None, None] * padded + new.count[:, None, None] * new.covariance
        )
        return ClassGaussians(both, mixed, scatter / both.clamp(min=1)[:, None, None])

    def shared_covariance(self) -> Tensor:
        """Return the mean of the classes' covariances, weighted by their counts, [D, D]."""
        if len(self.covariance) == 1:
            return self.covariance[0]
        return torch.einsum("c,cij->ij", self.count / self.count.sum(), self.covariance)

    def half_shared_covariances(self, shrinkage: float) -> Tensor:
        """Return covariances that are half a class's own and half the shared one, [outputs, D, D].

        They are moved towards the identity times the mean variance of all classes: with a multiple
        for each class, narrow classes would become too dense.
        """
        shared = self.shared_covariance()
        return shrink((self.covariance + shared) / 2, shrinkage, shared.diagonal().mean())


def _spread(count: Tensor, gaps: Tensor) -> Tensor:
    """Return n_c g_c g_c^T for each class, [outputs, D, D]."""
    return count[:, None, None] * gaps.unsqueeze(2) * gaps.unsqueeze(1)
