"""Uploads: the fields that clients send, alone or stacked, and their sums on the server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic

import torch
from typing_extensions import TypeVar

from perdure.core.errors import check_name, refuse
from perdure.core.trees import Tensors

# ---- Uploads: the fields that clients send, and their sums on the server after an exchange
#
# A field of an upload is a `Sum` (the server needs only the weighted sum, so that secure
# aggregation applies) or an `Each` (the server must see every client's value).

S = TypeVar("S", default=Any)
"""Type of the server state."""
C = TypeVar("C", default=Any)
"""Type of the client state."""


@dataclass(frozen=True)
class Nothing:
    """An empty state: the method keeps nothing between rounds."""


@dataclass(frozen=True)
class Sum:
    """A field of which the server learns sum(weight * value) and sum(weight), nothing else."""

    value: Tensors
    """Tensors by name, of the same shapes for all clients."""
    weight: float | None = None
    """Weight in the sum. If None, the client's weight: its number of examples, or 1 (uniform)."""


@dataclass(frozen=True)
class Each:
    """A field that the server sees per client. It must be named in `Needs.per_client_fields`."""

    value: Tensors
    """Tensors by name; shapes may differ between clients."""


Field = Sum | Each
Upload = Mapping[str, Field]
"""The fields that one client sends, by name."""


@dataclass(frozen=True)
class LocalUpdate:
    """The change of the model by local training, relative to what the client received."""

    update: Tensors
    """Change of every trained parameter that is not private."""
    buffers: Tensors
    """Change of the running statistics."""

    def as_stack(self) -> LocalUpdate:
        """Return the same update with a leading client axis, as a stack of one client."""
        both = (self.update, self.buffers)
        return LocalUpdate(*({n: t.unsqueeze(0) for n, t in values.items()} for values in both))


@dataclass(frozen=True)
class ClientResult(Generic[C]):
    """The fields that a client sends, and its state afterwards."""

    fields: Upload = field(default_factory=dict)
    """Fields by name."""
    state: C | None = None
    """New client state. If None, the client's state does not change."""


@dataclass(frozen=True)
class Change(Generic[S]):
    """The effect of a round on the server: increments of the model, and the state after it."""

    params: Tensors
    """Increments of parameters."""
    buffers: Tensors
    """Increments of running statistics."""
    state: S
    """Server state after the round."""


@dataclass
class CollectedUploads:
    """The uploads of an exchange as the server holds them: sums, weights and per-client values."""

    sums: dict[str, Tensors] = field(default_factory=dict)
    """Weighted sum of each Sum field."""
    weights: dict[str, float] = field(default_factory=dict)
    """Total weight of each Sum field."""
    per_client: dict[str, dict[int, Tensors]] = field(default_factory=dict)
    """Values of each Each field by client, in the order of their index."""
    client_weights: dict[int, float] = field(default_factory=dict)
    """Weights of the counted clients; under secure aggregation every client has the mean weight."""
    upload_fraction: float = 1.0
    """Fraction of the round's sampled clients that were counted."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """By client, how many rounds late its upload is; 0 unless aggregation is buffered."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation of the Gaussian noise on each number of a Sum field's sum, which
    `privacy.noise` adds. Fields without noise are not in it."""

    @property
    def clients(self) -> list[int]:
        """The clients that were counted, in the order of their index."""
        return list(self.client_weights)

    def has(self, name: str) -> bool:
        """Return whether any client sent this field."""
        return name in self.sums or name in self.per_client

    def total(self, name: str) -> Tensors:
        """Return the weighted sum of a Sum field."""
        check_name("uploads.total", name, self.sums)
        return self.sums[name]

    def mean(self, name: str) -> Tensors:
        """Return the weighted mean of a field over the clients that were counted."""
        if name in self.per_client:
            return _mean_per_client(self.per_client[name], self.client_weights)
        if name not in self.sums:
            check_name("uploads.mean", name, (*self.sums, *self.per_client))
        weight = self.weights[name]
        if not weight:
            where = f"uploads.mean: {name!r}"
            refuse(where, "a total weight of 0", "a field with a total weight that is not 0")
        return {key: total / weight for key, total in self.sums[name].items()}


def _mean_per_client(values: dict[int, Tensors], weights: dict[int, float]) -> Tensors:
    total = sum(weights[client] for client in values)
    names = next(iter(values.values()))
    return {
        name: sum((weights[c] * v[name] for c, v in values.items()), torch.zeros(())) / total
        for name in names
    }


# ---- Uploads in transit, of one client or a stack of clients, and how the server adds them up

Losses = dict[int, tuple[float, float]]
"""By client, its weight and its mean training loss over the local steps of a round."""


@dataclass(frozen=True)
class StackedUploads:
    """The uploads of one or more clients, stacked: every tensor has a leading client axis."""

    clients: tuple[int, ...]
    """Index of each client."""
    weights: tuple[float, ...]
    """Weight of each client."""
    fields: Upload
    """Stacked fields by name."""


@dataclass(frozen=True)
class FailedUpload:
    """A client whose upload did not arrive or cannot be used."""

    client: int
    """Index of the client."""
    reason: str
    """Why there is no usable upload."""
    answered: bool = False
    """Whether a reply arrived that could not be used."""


@dataclass(frozen=True)
class MaskedUpload:
    """One client's upload under secure aggregation: only the sum over clients can be read."""

    client: int
    """Index of the client."""
    data: bytes
    """The masked message."""


def stack_of_one(client: int, weight: float, upload: Upload) -> StackedUploads:
    """Return one client's upload as a stack of one client."""
    fields = {
        name: replace(field, value={key: t.unsqueeze(0) for key, t in field.value.items()})
        for name, field in upload.items()
    }
    return StackedUploads((client,), (weight,), fields)


# ---- The largest weights with which clients may upload


@dataclass(frozen=True)
class WeightBounds:
    """The largest weights of the clients of one exchange."""

    cap: float
    """Number of examples beyond which a client's do not count; infinite without a cap."""
    largest: Mapping[int, float]
    """By client, the largest weight of a Sum."""

    def impossible(self, uploads: CollectedUploads, rounding: float) -> str | None:
        """Return a sentence about a field whose total weight no allowed weights add up to.

        Args:
            uploads: A sum of uploads.
            rounding: Error of a total by the format of its numbers.

        """
        most = sum(self.largest[client] for client in uploads.clients)
        for name, weight in uploads.weights.items():
            if not -rounding <= weight <= most * (1 + 1e-6) + rounding:
                return f"{name}: total weight: must be 0 to {most:g}, got {weight:g}"
        return None

    def with_equal_weights(self) -> WeightBounds:
        """Return the bounds of clients that all have weight 1."""
        return WeightBounds(self.cap, dict.fromkeys(self.largest, 1.0))


def check_weights(upload: Upload, largest: float) -> str | None:
    """Return a sentence about a weight that is too large, or None.

    Args:
        upload: One client's upload.
        largest: The largest weight of a Sum that the client may have.

    """
    for name, weight in _weights(upload):
        if not weight <= largest * (1 + 1e-9):
            return f"{name}: weight: must be at most {largest:g}, got {weight:g}"
    return None


def limit_weights(upload: Upload, largest: float) -> Upload:
    """Return an upload whose explicit weights are at most `largest`."""
    if all(weight <= largest for _, weight in _weights(upload)):
        return upload
    return {
        name: Sum(field.value, min(field.weight, largest))
        if isinstance(field, Sum) and field.weight is not None
        else field
        for name, field in upload.items()
    }


def _weights(upload: Upload) -> Iterable[tuple[str, float]]:
    for name, sent in upload.items():
        if isinstance(sent, Sum) and sent.weight is not None:
            yield name, sent.weight
