"""One local step as a method's functions see it: rows, a forward pass, a loss.

All functions are pure: on the vector engine they run under vmap for a stack of clients, and are
traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perdure.core.errors import refuse, type_name
from perdure.core.trees import Tensors, Tree
from perdure.models.network import Network
from perdure.models.ops import ForwardPass, cross_entropy


@dataclass(frozen=True)
class Batch:
    """The rows of a local step: extra rows first, then the client's examples, padding last."""

    x: Tensor
    """[rows, ...]: inputs of the network."""
    y: Tensor
    """int64 [rows]: index of the correct output; or float [rows]: the number to predict."""
    mask: Tensor | None = None
    """float [rows]: 0 for padding. If None, no row is padding. Only `Step.mean` uses it."""
    active_outputs: Tensor | None = None
    """bool [outputs] or [rows, outputs]: the outputs included in the loss. If None, all."""
    cached_features: Tensor | None = None
    """Per row, what the frozen part of the network computed before training, if it is cached."""
    epoch: Tensor | None = None
    """int64 scalar: the local epoch, from 0. If None, the first."""
    extra: int = 0
    """Number of extra rows, which come first."""
    weight: Tensor | None = None
    """float [rows]: weight of each row in means over rows. If None, 1. Only `Step.mean` uses it."""

    @property
    def mean_weights(self) -> Tensor | None:
        """Return `mask` times `weight`, float [rows]; None if all rows weigh alike."""
        if self.mask is None or self.weight is None:
            return self.weight if self.mask is None else self.mask
        return self.mask * self.weight


@dataclass(frozen=True)
class Rows:
    """Rows that are added to a client's batch: replayed or synthetic examples."""

    x: Tensor
    """[rows, ...]: inputs of the network."""
    y: Tensor
    """int64 [rows]: index of the correct output; or float [rows]: the number to predict."""
    mask: Tensor
    """float [rows]: 0 for rows that do not count, such as those of an empty replay memory."""
    active_outputs: Tensor | None = None
    """bool [rows, outputs]. If None, the active outputs of the client's examples."""
    weight: Tensor | None = None
    """float [rows]: weight of each row in means over rows, where an example of the client has 1. If
    None, 1."""


@dataclass(frozen=True)
class Scalar:
    """A loss without rows, or one that the method has averaged over rows (`Step.mean`)."""

    value: Tensor
    """A tensor with a single value."""


LossTerm = Tensor | Scalar
"""What `loss` and `penalty` return: float [rows], which the engine averages, or a Scalar."""


@dataclass(frozen=True)
class Step:
    """One local step of one client."""

    params: Tensors
    """All parameters, trained or not."""
    batch: Batch
    """The rows of this step."""
    broadcast: Tree
    """The fields that the server sent, and the global model as `params`."""
    tensors: Tensors
    """`Prepared.tensors` of this client."""
    key: Tensor
    """int64 scalar, different in every step; random numbers within a step are hashed from it."""
    network: Network
    """The network with the outputs so far."""
    fwd: ForwardPass
    """The circumstances of the forward pass: training mode, running statistics, dropout."""
    extra: slice = field(default_factory=lambda: slice(0, 0))
    """The rows of the batch that this method added with `extra_rows`."""
    extra_by_method: Mapping[str, slice] = field(default_factory=dict)
    """The rows that each method of a combination added, by the method's name."""
    memo: dict[str, Tensor] = field(default_factory=dict)
    """Features and logits that have been computed in this step."""

    def features(self) -> Tensor:
        """Return the head's input, float [rows, feature size]; computed once per step."""
        if "features" not in self.memo:
            self.memo["features"] = self.network.features(self.params, self.batch.x, self.fwd)
        return self.memo["features"]

    def logits(self) -> Tensor:
        """Return the logits, float [rows, outputs]; computed once per step."""
        if "logits" not in self.memo:
            features = self.features()
            self.memo["logits"] = self.network.classify(self.params, features, self.fwd)
        return self.memo["logits"]

    def classify(self, features: Tensor) -> Tensor:
        """Return the logits for given inputs of the head."""
        return self.network.classify(self.params, features, self.fwd)

    def logits_of(self, params: Tensors, buffers: Tensors) -> Tensor:
        """Return another model's logits, float [rows, outputs], without gradient or dropout.

        Args:
            params: All parameters of that model.
            buffers: Its running statistics.

        """
        fwd = ForwardPass(buffers=buffers, mask=self.batch.mask, under_vmap=self.fwd.stacked)
        return self.network.logits(params, self.batch.x, fwd).detach()

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the cross-entropy of every row over the active outputs, float [rows].

        If targets are numbers (`data.target: number`), it is the squared error.
        """
        return target_losses(logits, self.batch)

    def mean(self, values: Tensor, among: Tensor | None = None) -> Tensor:
        """Return the mean over the rows that are not padding, by their weights.

        Args:
            values: float [rows].
            among: float [rows], 1 for the rows that count and else 0. Default: all rows.

        """
        weights = self.batch.mean_weights
        if among is not None:
            weights = among if weights is None else weights * among
        return masked_mean(values, weights)


def target_losses(logits: Tensor, batch: Batch) -> Tensor:
    """Return the loss of every row of a batch, float [rows].

    It is the cross-entropy over the active outputs; or the squared error, if targets are numbers.
    """
    if batch.y.is_floating_point():
        return (logits[:, 0] - batch.y).square()
    logits = mask_inactive(logits, batch)
    if batch.mask is None:  # a single operation, which does not exist under vmap
        return F.cross_entropy(logits, batch.y, reduction="none")
    return cross_entropy(logits, batch.y)


def mean_target_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean of `target_losses` over the rows that are not padding."""
    alike = batch.mask is None and batch.weight is None
    if alike and not batch.y.is_floating_point():  # the same in a single operation
        if batch.active_outputs is not None:
            logits = mask_inactive(logits, batch)
        return F.cross_entropy(logits, batch.y)
    return masked_mean(target_losses(logits, batch), batch.mean_weights)


def mask_inactive(logits: Tensor, batch: Batch) -> Tensor:
    """Return the logits, with a very low value for outputs that are not active."""
    active = batch.active_outputs
    return logits if active is None else logits.masked_fill(~active, -1e9)


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of the values where the mask is 1, or 0 if there are none."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def mean_loss(where: str, term: LossTerm | list[LossTerm], step: Step) -> Tensor:
    """Return the mean over rows of what `loss` or `penalty` returned; refuse wrong values.

    Args:
        where: `loss` or `penalty`, for an error message.
        term: The returned value; a list is added up.
        step: The local step.

    """
    if isinstance(term, list):
        means = [mean_loss(where, item, step) for item in term]
        return sum(means[1:], means[0])
    if isinstance(term, Scalar):
        if term.value.dim():
            refuse(where, f"a Scalar of shape {list(term.value.shape)}", "a Scalar of one value")
        return term.value
    _check_rows(where, term, len(step.batch.y))
    return step.mean(term)


def _check_rows(where: str, term: Any, rows: int) -> None:
    expected = f"one value per row ([{rows}])"
    if not isinstance(term, Tensor):
        refuse(where, type_name(term), f"a tensor with {expected}")
    if term.dim() == 0:
        refuse(
            where, "a single value",
            f"{expected}, which the engine averages over the rows that are not padding "
            "(reduction='none'); or Scalar(value) if it is no mean over rows",
        )  # fmt: skip
    if term.shape != (rows,):
        refuse(where, f"shape {list(term.shape)}", expected)


def join_rows(step: Step, rows: Rows | dict[str, Rows]) -> Step:
    """Return the step with extra rows before the client's examples.

    Args:
        step: The local step.
        rows: Extra rows; of a combination by the name of the method that added them.

    """
    by_method = rows if isinstance(rows, dict) else {"": rows}
    added, batch = list(by_method.values()), step.batch
    for extra_rows in added:
        _check_extra(extra_rows, batch)
    mask = torch.ones_like(batch.y, dtype=torch.float32) if batch.mask is None else batch.mask
    joined = Batch(
        torch.cat([*(extra.x for extra in added), batch.x]),
        torch.cat([*(extra.y for extra in added), batch.y]),
        torch.cat([*(extra.mask.to(mask.dtype) for extra in added), mask]),
        _joined_outputs(added, batch),
        None,
        batch.epoch,
        sum(len(extra.y) for extra in added),
        _joined_weights(added, mask),
    )
    extra_by_method = _slices(by_method)
    fwd = replace(step.fwd, mask=joined.mask)
    extra = extra_by_method.get("", slice(0, 0))
    return replace(
        step, batch=joined, fwd=fwd, extra_by_method=extra_by_method, extra=extra, memo={}
    )


def _check_extra(rows: Rows, batch: Batch) -> None:
    if not isinstance(rows, Rows):
        refuse("extra_rows", type_name(rows), "a Rows")
    if not len(rows.x) == len(rows.y) == len(rows.mask):
        counts = f"{len(rows.x)} x, {len(rows.y)} y and {len(rows.mask)} mask"
        refuse("extra_rows", counts, "one x, y and mask per row")
    if rows.weight is not None and rows.weight.shape != rows.mask.shape:
        shape = f"a weight of shape {list(rows.weight.shape)}"
        refuse("extra_rows", shape, f"one weight per row ({list(rows.mask.shape)})")
    if rows.x.shape[1:] != batch.x.shape[1:]:
        shape = f"rows of shape {list(rows.x.shape[1:])}"
        refuse("extra_rows", shape, f"rows of shape {list(batch.x.shape[1:])}")


def _joined_outputs(added: list[Rows], batch: Batch) -> Tensor | None:
    active = batch.active_outputs
    if active is None:
        return None
    masks = [
        active.expand(len(rows.y), -1) if rows.active_outputs is None else rows.active_outputs
        for rows in added
    ]
    return torch.cat([*masks, active.expand(len(batch.y), -1)])


def _joined_weights(added: list[Rows], mask: Tensor) -> Tensor | None:
    """Return the weights of the joined rows, or None if all are 1; `mask` is the client's."""
    if all(rows.weight is None for rows in added):
        return None
    weights = [torch.ones_like(rows.mask) if rows.weight is None else rows.weight for rows in added]
    return torch.cat([*(weight.to(mask.dtype) for weight in weights), torch.ones_like(mask)])


def _slices(by_method: dict[str, Rows]) -> dict[str, slice]:
    extra_by_method, first = {}, 0
    for name, rows in by_method.items():
        extra_by_method[name] = slice(first, first + len(rows.y))
        first += len(rows.y)
    return extra_by_method
