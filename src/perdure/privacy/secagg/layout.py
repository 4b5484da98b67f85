"""The summed fields of an upload as one row of fixed-point numbers, whose sums stay exact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perdure.contract.uploads import CollectedUploads, Sum, Upload
from perdure.core.received import (
    REAL_DTYPES,
    Integer,
    Items,
    OneOf,
    Part,
    Shape,
    Text,
    bad,
    read_distinct,
)
from perdure.core.trees import Tensors

# ---- Sizes of what secure sums exchange, in bytes; known without the extra `privacy`

KEY_BYTES = 32
"""Size of keys, seeds and pads."""
COMMIT_BYTES = 16
"""Size of a commitment."""
TAG_BYTES = 16
"""Size by which encryption grows a text."""
SHARE_BYTES = 33
"""Size of a share of a secret."""
SEALED_BYTES = SHARE_BYTES + TAG_BYTES
"""Size of an encrypted share."""
DIGEST_BYTES = 32
"""Size of the digest of a request."""
LARGEST = 1_000_000_000
"""Upper bound on indices and counts in messages."""
MOST_CLIENTS = 1_000_000
"""Upper bound on the clients of a sum."""
_MOST = 100_000
"""Upper bound on the fields and tensors of an upload."""
_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in REAL_DTYPES)
OVERHEAD = "secagg"
"""Name in the ledger of all bytes except the masked values."""


# ---- Fixed-point numbers modulo a power of two, whose sums stay exact under masks
#
# A value v becomes round(v * 2^precision) modulo 2^bits. A sum modulo 2^bits is right if the true
# sum fits, which the limit on each client's values ensures for a given number of clients.

Vector = NDArray[Any]
"""Unsigned integers modulo 2^bits: uint32 or uint64 [N]."""


@dataclass(frozen=True)
class FixedPoint:
    """A fixed-point format for sums over at most `clients` clients."""

    bits: Annotated[int, Integer(32, 64)]
    """Bits of a number: 32 or 64."""
    precision: Annotated[int, Integer(0, 63)]
    """Bits after the binary point."""
    clients: Annotated[int, Integer(1, LARGEST)]
    """Largest number of clients in a sum."""

    def __post_init__(self) -> None:
        if self.bits not in (32, 64) or self.clients < 1 or not 0 <= self.precision < 64:
            raise ValueError(
                f"a fixed-point format needs 32 or 64 bits, fewer than 64 after the point, and a "
                f"client, got {self.bits} bits, {self.precision} after the point, for "
                f"{self.clients} clients"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the numbers: unsigned, little-endian."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def step(self) -> float:
        """The difference of two neighboring values."""
        return 2.0**-self.precision

    @property
    def limit(self) -> float:
        """The largest absolute value of a client for which no sum overflows."""
        return self._largest * self.step

    @property
    def _largest(self) -> int:
        largest: int = (2 ** (self.bits - 1) - 1) // self.clients
        return largest

    def fits(self, values: NDArray[np.float64]) -> bool:
        """Return whether all values are finite and no sum of such values can overflow."""
        # compares every value, not the largest: a comparison with NaN is false, as it should be
        return bool((np.abs(values) <= self.limit).all())

    def encode(self, values: NDArray[np.float64]) -> Vector:
        """Return values as fixed-point numbers.

        Raises:
            ValueError: A value does not fit.

        """
        if not self.fits(values):
            raise ValueError(f"a value lies outside of [{-self.limit}, {self.limit}]")
        integers = np.rint(values * 2.0**self.precision)
        # near 2^63 floats are coarser than integers: the limit itself may have been rounded up
        largest = float(self._largest)
        if largest > self._largest:
            largest = float(np.nextafter(largest, 0))
        return np.clip(integers, -largest, largest).astype(np.int64).astype(self.dtype)

    def decode(self, total: Vector) -> NDArray[np.float64]:
        """Return a sum of fixed-point numbers as float64."""
        signed = total.view(f"<i{self.bits // 8}")
        values: NDArray[np.float64] = signed.astype(np.float64) * self.step
        return values

    def zeros(self, size: int) -> Vector:
        """Return the sum of no rows of this size."""
        return np.zeros(size, dtype=self.dtype)


# ---- The summed fields of an upload as one row of numbers, and the sum of such rows as fields
#
# A row holds the weight of each field first, then each field's values times its weight. The server
# can therefore form weighted means from the sum alone, and no client's weight is revealed.

Row = NDArray[np.float64]
"""A client's upload as numbers: float64 [N]."""


@dataclass(frozen=True)
class Slot:
    """The position of one tensor in a row."""

    field: Annotated[str, Text()]
    """Name of the upload's field."""
    key: Annotated[str, Text()]
    """Name of the tensor within the field."""
    shape: Annotated[tuple[int, ...], Shape()]
    """Shape of the tensor."""
    dtype: Annotated[str, OneOf(_DTYPES)]
    """Name of its torch dtype, such as "float32"."""

    @property
    def size(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The meaning of a row's numbers, which is the same for all clients of an exchange."""

    fields: Annotated[tuple[str, ...], Items(Text(), _MOST, distinct=True)]
    """Names of the fields, in the order of their weights."""
    slots: Annotated[tuple[Slot, ...], Items(Part(Slot), _MOST)]
    """The tensors, in the order of their values."""

    def check(self) -> None:
        """Raise a ValueError if a tensor is there twice, or of no field."""
        read_distinct("slots", [(slot.field, slot.key) for slot in self.slots])
        for slot in self.slots:
            if slot.field not in self.fields:
                raise bad("field", slot.field, "one of the layout's fields")

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
    """Return a client's upload as a row."""
    sums = sums_of(upload)
    weights = {name: weight if f.weight is None else f.weight for name, f in sums.items()}
    pieces = [np.array(list(weights.values()), dtype=np.float64)]
    for name, field in sums.items():
        pieces += [weights[name] * _to_row(tensor) for tensor in field.value.values()]
    return np.concatenate(pieces)


def _to_row(tensor: Tensor) -> Row:
    row: Row = tensor.detach().cpu().to(torch.float64).flatten().numpy()
    return row
