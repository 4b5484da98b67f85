"""The summed fields of an upload as one row of numbers, and the sum of such rows as fields.

A row holds the weight of each field first, then each field's values times its weight. The server
can therefore form weighted means from the sum alone, and no client's weight is revealed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perdure.contract.uploads import CollectedUploads, Sum, Upload
from perdure.core.trees import Tensors

Row = NDArray[np.float64]
"""A client's upload as numbers: float64 [N]."""


@dataclass(frozen=True)
class Slot:
    """The position of one tensor in a row."""

    field: str
    """Name of the upload's field."""
    key: str
    """Name of the tensor within the field."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    dtype: str
    """Name of its torch dtype, such as "float32"."""

    @property
    def size(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The meaning of a row's numbers, which is the same for all clients of an exchange."""

    fields: tuple[str, ...]
    """Names of the fields, in the order of their weights."""
    slots: tuple[Slot, ...]
    """The tensors, in the order of their values."""

    @property
    def size(self) -> int:
        """Length of a row."""
        return len(self.fields) + sum(slot.size for slot in self.slots)

    def collected(self, row: Row, clients: list[int]) -> CollectedUploads:
        """Return the sum of the clients' rows as collected uploads.

        Args:
            row: The sum, float64 [size].
            clients: The clients whose rows are in the sum.
        """
        weights = dict(zip(self.fields, map(float, row), strict=False))
        sums: dict[str, Tensors] = {name: {} for name in self.fields}
        start = len(self.fields)
        for slot in self.slots:
            values = row[start : start + slot.size].reshape(slot.shape)
            sums[slot.field][slot.key] = torch.from_numpy(values).to(_sum_dtype(slot.dtype))
            start += slot.size
        mean = weights[self.fields[0]] / len(clients) if self.fields and clients else 0.0
        return CollectedUploads(sums, weights, {}, dict.fromkeys(clients, mean))


def _sum_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return torch.promote_types(dtype, torch.float32)


def layout_of(upload: Upload) -> Layout:
    """Return the layout of a client's upload, whose fields must all be sums."""
    slots = [
        Slot(name, key, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, field in sums_of(upload).items()
        for key, tensor in field.value.items()
    ]
    return Layout(tuple(upload), tuple(slots))


def sums_of(upload: Upload) -> Mapping[str, Sum]:
    """Return the fields of an upload.

    Raises:
        TypeError: A field is not a `Sum`.
    """
    for name, field in upload.items():
        if not isinstance(field, Sum):
            raise TypeError(f"the server would have to see the field {name!r} client by client")
    return {name: field for name, field in upload.items() if isinstance(field, Sum)}


def row_of(upload: Upload, weight: float) -> Row:
    """Return a client's upload as a row.

    Args:
        upload: Summed fields only.
        weight: The client's weight, for fields without a separate weight.
    """
    sums = sums_of(upload)
    weights = {name: weight if f.weight is None else f.weight for name, f in sums.items()}
    pieces = [np.array(list(weights.values()), dtype=np.float64)]
    for name, field in sums.items():
        pieces += [weights[name] * _to_row(tensor) for tensor in field.value.values()]
    return np.concatenate(pieces)


def _to_row(tensor: Tensor) -> Row:
    row: Row = tensor.detach().cpu().to(torch.float64).flatten().numpy()
    return row
