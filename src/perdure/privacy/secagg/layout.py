"""The summed fields of an upload as one row of numbers, and back from the sum of such rows.

A row holds the weight of each field first, then each field's values times its weight: so the server
can form weighted means from the sum alone, and no client's weight is sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perdure.contract.uploads import CollectedUploads, Sum, Upload
from perdure.core.trees import Tensors

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Slot:
    """One tensor of a field."""

    field: str
    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Numbers it holds."""
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """What the numbers of a row stand for; the same for all clients of a round."""

    fields: tuple[str, ...]
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """Numbers in a row."""
        return len(self.fields) + sum(slot.size for slot in self.slots)

    def report(self, row: Row, clients: list[int]) -> CollectedUploads:
        """The sum of the clients' rows as the server's half of a method sees it."""
        weights = dict(zip(self.fields, map(float, row), strict=False))
        totals: dict[str, Tensors] = {name: {} for name in self.fields}
        first = len(self.fields)
        for slot in self.slots:
            part = row[first : first + slot.size].reshape(slot.shape)
            totals[slot.field][slot.key] = torch.from_numpy(part).to(_sum_type(slot.dtype))
            first += slot.size
        mean = weights[self.fields[0]] / len(clients) if self.fields and clients else 0.0
        return CollectedUploads(totals, weights, {}, dict.fromkeys(clients, mean))


def _sum_type(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return torch.promote_types(dtype, torch.float32)


def layout_of(upload: Upload) -> Layout:
    """The layout of a client's upload, which must have summed fields only."""
    slots = [
        Slot(field, key, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for field, part in sums_of(upload).items()
        for key, tensor in part.value.items()
    ]
    return Layout(tuple(upload), tuple(slots))


def sums_of(upload: Upload) -> Mapping[str, Sum]:
    """The fields, which must all be sums."""
    for name, part in upload.items():
        if not isinstance(part, Sum):
            raise TypeError(f"the server would have to see the field {name!r} client by client")
    return {name: part for name, part in upload.items() if isinstance(part, Sum)}


def row_of(upload: Upload, weight: float) -> Row:
    """A client's row: weights, and values times weights."""
    sums = sums_of(upload)
    weights = {name: weight if p.weight is None else p.weight for name, p in sums.items()}
    parts = [np.array(list(weights.values()), dtype=np.float64)]
    for name, part in sums.items():
        parts += [weights[name] * _numbers(tensor) for tensor in part.value.values()]
    return np.concatenate(parts)


def _numbers(tensor: Tensor) -> Row:
    numbers: Row = tensor.detach().cpu().to(torch.float64).flatten().numpy()
    return numbers
