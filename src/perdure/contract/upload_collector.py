"""Uploads on their way: one client's or a stack of many, and how the server adds them up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.contract.checks import refuse
from perdure.contract.uploads import CollectedUploads, Each, Field, Sum, Upload
from perdure.core.trees import Tensors


@dataclass(frozen=True)
class StackedUploads:
    """The uploads of one or more clients, stacked: every tensor has a leading client axis."""

    clients: tuple[int, ...]
    weights: tuple[float, ...]
    fields: Upload


@dataclass(frozen=True)
class FailedUpload:
    """A client from which nothing can be counted: it did not answer, or not with what was asked."""

    client: int
    reason: str
    answered: bool = False
    """Whether an answer came that could not be used."""


@dataclass(frozen=True)
class MaskedUpload:
    """One client's upload as it travels under secure aggregation: only a sum can be opened."""

    client: int
    data: bytes


def single(client: int, weight: float, upload: Upload) -> StackedUploads:
    """One client's upload as a stack of one."""
    fields = {name: _stacked(part) for name, part in upload.items()}
    return StackedUploads((client,), (weight,), fields)


def _stacked(part: Field) -> Field:
    value = {name: tensor.unsqueeze(0) for name, tensor in part.value.items()}
    return Sum(value, part.weight) if isinstance(part, Sum) else Each(value)


class UploadCollector:
    """Adds up uploads as they come; answers must come in the order of the clients' index."""

    is_incremental = True
    """Whether an upload that was added is counted whatever comes after it."""

    def __init__(self) -> None:
        self.collected = CollectedUploads()
        self.rejected: list[int] = []
        self.failures: list[FailedUpload] = []
        self.empty_uploads = 0
        """Clients that did their work and had nothing to send."""
        self.abort_reason: str | None = None
        """Why the round must be begun again with other clients, if it must."""

    def add(self, uploads: StackedUploads | MaskedUpload | FailedUpload) -> None:
        """Count the finite uploads; clients with a value that is not finite are left out."""
        if isinstance(uploads, MaskedUpload):
            raise TypeError("a masked upload needs a secure sum")
        if isinstance(uploads, FailedUpload):
            self.failures.append(uploads)
            return
        good = finite(uploads)
        if not all(good):
            self.rejected += [c for c, ok in zip(uploads.clients, good, strict=True) if not ok]
            uploads = _only(uploads, good)
        for client, weight in zip(uploads.clients, uploads.weights, strict=True):
            self.collected.client_weights[client] = weight
        if uploads.clients:
            for name, part in uploads.fields.items():
                self._add_field(name, part, uploads)

    def close(self) -> None:
        """Everything that will come has come."""

    def _add_field(self, name: str, part: Field, uploads: StackedUploads) -> None:
        if isinstance(part, Each):
            for row, client in enumerate(uploads.clients):
                value = {key: tensor[row] for key, tensor in part.value.items()}
                self.collected.per_client.setdefault(name, {})[client] = value
            return
        count = len(uploads.clients)
        weights = uploads.weights if part.weight is None else (part.weight,) * count
        totals = self.collected.sums.setdefault(name, {})
        for key, tensor in part.value.items():
            _accumulate(totals, key, tensor, weights)
        self.collected.weights[name] = self.collected.weights.get(name, 0.0) + sum(weights)


def _accumulate(totals: Tensors, key: str, stacked: Tensor, weights: tuple[float, ...]) -> None:
    # counts and half precision would cut weights off, or overflow
    stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
    if len(weights) == 1:
        value = stacked[0] * weights[0]
    else:
        value = torch.tensordot(stacked.new_tensor(weights), stacked, dims=1)
    if key in totals and totals[key].shape != value.shape:
        other = f"shape {list(totals[key].shape)}, which another client sent"
        refuse(f"Sum: {key!r}", f"shape {list(value.shape)}", other)
    totals[key] = totals[key] + value if key in totals else value


def finite(uploads: StackedUploads) -> list[bool]:
    """For each client whether all that it sent is finite."""
    good = torch.ones(len(uploads.clients), dtype=torch.bool)
    for part in uploads.fields.values():
        for tensor in part.value.values():
            if tensor.is_floating_point():
                good &= _finite_rows(tensor.unsqueeze(-1).flatten(1)).cpu()
    return [bool(ok) for ok in good]


def _finite_rows(rows: Tensor) -> Tensor:
    # a finite sum has finite terms only, and is read off faster; large terms may overflow it
    good = torch.isfinite(rows.sum(1))
    return good if bool(good.all()) else torch.isfinite(rows).all(1)


def _only(uploads: StackedUploads, good: list[bool]) -> StackedUploads:
    rows = [row for row, ok in enumerate(good) if ok]

    def pick(part: Field) -> Field:
        value = {name: tensor[rows] for name, tensor in part.value.items()}
        return Sum(value, part.weight) if isinstance(part, Sum) else Each(value)

    return StackedUploads(
        tuple(uploads.clients[row] for row in rows),
        tuple(uploads.weights[row] for row in rows),
        {name: pick(part) for name, part in uploads.fields.items()},
    )
