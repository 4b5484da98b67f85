"""Fixed-point numbers modulo a power of two, whose sums stay exact under masks.

A value v becomes round(v * 2^precision) modulo 2^bits. A sum modulo 2^bits is right if the true sum
fits, which the limit on each client's values ensures for a given number of clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]
"""Unsigned integers modulo 2^bits: uint32 or uint64 [N]."""


@dataclass(frozen=True)
class FixedPoint:
    """A fixed-point format for sums over at most `clients` clients."""

    bits: int
    """Bits of a number: 32 or 64."""
    precision: int
    """Bits after the binary point."""
    clients: int
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
