"""Classifiers in closed form from sums over examples, and Gaussians of classes."""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.class_statistics import (
    LinearHead,
    class_means,
    class_totals,
    shrink,
    within_scatter,
)
from perdure.contract.context import Client, Context, Server, in_large_class, warn_nothing_sent
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.core.trees import Tensors
from perdure.models.network import Network

# ---- What methods say if no client may send a statistic, since all groups of rows are too small.

log = logging.getLogger(__name__)


def warn_of_missing_classes(method: str, context: Context, count: Tensor) -> None:
    """Log which classes of the current task no client sent anything about.

    Args:
        method: Kind of the method.
        context: The exchange.
        count: [classes]: rows of each class of the task, or 0 if it is missing.

    """
    classes = context.network.outputs.task_classes[context.task]
    missing = [str(c) for c, n in zip(classes, count.tolist(), strict=True) if not n]
    if missing:
        log.warning(
            "task %d: %s: nothing is known about classes %s: no client has enough rows of them "
            "(privacy.min_rows) to send anything",
            context.task + 1, method, ", ".join(missing),
        )  # fmt: skip


def counts_of_task(count: Tensor, context: Context) -> Tensor:
    """Return the entries of the current task's classes, given those of all outputs [outputs]."""
    outputs, task = context.network.outputs, context.task
    return count[outputs.targets(task)[list(outputs.task_classes[task])].to(count.device)]


# ---- Gaussians of classes from sums over examples, joined over tasks and moved by linear maps


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
    """Return the matrix A, [D, D], that maps old features to new ones: F' is about F A."""
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


# ---- Classifiers in closed form from sums over examples: no gradient steps, nothing is forgotten.
#
# At a task's end every client sends, for the examples of the task, the count and the total of each
# class's inputs and their Gram matrix, as one `Sum`. The server adds them to those of earlier
# tasks. Since all of it is sums, the classifier is that of all examples together, whatever the
# order of tasks and clients.


@dataclass(frozen=True)
class ClassSums:
    """Server state: sums over the examples of all tasks so far."""

    count: Tensor | None = None
    """double [outputs]: examples of each output."""
    total: Tensor | None = None
    """double [outputs, D]: sum of their inputs."""
    gram: Tensor | None = None
    """double [D, D]: sum of x x^T over all examples; None if the method does not need it."""

    def plus(self, new: Tensors) -> ClassSums:
        """Return these sums and those of more examples; outputs that are new begin at 0."""
        if self.count is None or self.total is None:
            return ClassSums(new["count"], new["total"], new.get("gram"))
        grown = len(new["count"]) - len(self.count)
        count = F.pad(self.count, (0, grown)) + new["count"]
        total = F.pad(self.total, (0, 0, 0, grown)) + new["total"]
        return ClassSums(count, total, None if self.gram is None else self.gram + new["gram"])


@dataclass(frozen=True)
class ClosedForm(Method):
    """A classifier that follows from class sums; a subclass says how."""

    inputs: Literal["features", "raw"] = "features"
    """`features`: the head's inputs. `raw`: the normalized examples themselves, flattened."""
    train_first: bool = False
    """Whether the network is trained by FedAvg in the first task; its features are frozen then."""

    ServerState: ClassVar[type] = ClassSums
    needs_gram: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    kind: ClassVar[str] = "closed form"
    """Name in the registry."""

    @property
    def needs(self) -> Needs:
        """What it needs: all class sums at prediction."""
        state = ("count", "total", "gram")
        return Needs(classes=self.needs_classes, prediction_state=state)

    def check_config(self, config: Any) -> str | None:
        """Return why it cannot run: token ids have no mean."""
        if self.inputs == "raw" and config.model.reads_text:
            return "method.inputs: must be 'features' with model.kind 'text', got 'raw'"
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train in the first task if asked to; gather the sums at every task's end."""
        trains = self.train_first and context.task == 0
        sums = Exchange("sums", client_work=self.add_up, aggregate=self.gather)
        return [Train(rounds=None if trains else 0), sums]

    def add_up(self, client: Client) -> ClientResult:
        """Return the sums over the client's examples, but for classes with too few of them."""
        client = client.without_small_classes()
        outputs = client.context.network.outputs.count(client.context.task)
        parts = [self._sums_of(client, batch, outputs) for batch in client.data.batches()]
        totals = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
        return ClientResult({"sums": Sum(totals, weight=1.0)})

    def _sums_of(self, client: Client, batch: Any, outputs: int) -> Tensors:
        rows = batch.x.flatten(1) if self.inputs == "raw" else client.features(batch)
        count, total = class_totals(rows, batch.y, outputs)
        sums = {"count": count, "total": total}
        return sums | {"gram": rows.double().T @ rows.double()} if self.needs_gram else sums

    def gather(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        """Add the clients' sums to those of earlier tasks."""
        sums = uploads.total("sums") if uploads.has("sums") else None
        if sums is None or not sums["count"].sum():
            warn_nothing_sent(self.kind, context, "none of its classes can be predicted")
            return server
        if not context.network.outputs.is_number:
            warn_of_missing_classes(self.kind, context, counts_of_task(sums["count"], context))
        return replace(server, state=server.state.plus(sums))

    @abstractmethod
    def head(self, sums: ClassSums) -> LinearHead:
        """Return the classifier of these sums."""

    def predict_features(
        self, server: Server, x: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the classifier's inputs: features of the network, or the examples themselves."""
        return (
            x.flatten(1) if self.inputs == "raw" else super().predict_features(server, x, network)
        )

    def predict_from_features(
        self, server: Server, features: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits of the closed-form head; the network's own before the first sums."""
        if server.state.count is None and self.inputs == "features":
            return super().predict_from_features(server, features, network)
        if server.state.count is None:
            newest = len(network.outputs.task_classes) - 1
            return features.new_zeros(len(features), network.outputs.count(newest))
        logits = self.head(server.state).logits(features)
        return logits[:, :1] if network.outputs.is_number else logits
