"""Fixed-point numbers in a ring: sums of them are exact, whatever masks were added and taken away.

A value v becomes round(v * 2^precision) modulo 2^bits. Sums modulo 2^bits are right as long as the
true sum fits, which the limit on each client's values ensures for the given number of clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[Any]
"""Unsigned whole numbers of the ring."""


@dataclass(frozen=True)
class FixedPoint:
    """The ring and the step of the values, for sums over at most `clients` clients."""

    bits: int
    precision: int
    clients: int

    def __post_init__(self) -> None:
        if self.bits not in (32, 64) or self.clients < 1:
            raise ValueError(f"no grid has {self.bits} bits for {self.clients} clients")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numbers of the ring."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def step(self) -> float:
        """The distance of two values that can be told apart."""
        return 2.0**-self.precision

    @property
    def limit(self) -> float:
        """The largest size of a client's value for which no sum overflows."""
        return self._largest * self.step

    @property
    def _largest(self) -> int:
        largest: int = (2 ** (self.bits - 1) - 1) // self.clients
        return largest

    def fits(self, values: NDArray[np.float64]) -> bool:
        """Whether no sum of such values can overflow; values that are not finite never fit."""
        # not by the largest value: a comparison with NaN is false, which is what is wanted here
        return bool((np.abs(values) <= self.limit).all())

    def encode(self, values: NDArray[np.float64]) -> Vector:
        """Values that fit, as numbers of the ring."""
        if not self.fits(values):
            raise ValueError(f"a value lies outside of [{-self.limit}, {self.limit}]")
        whole = np.rint(values * 2.0**self.precision)
        # near 2^63 floats are coarser than whole numbers: the limit itself may have rounded up
        largest = float(self._largest)
        if largest > self._largest:
            largest = float(np.nextafter(largest, 0))
        return np.clip(whole, -largest, largest).astype(np.int64).astype(self.dtype)

    def decode(self, total: Vector) -> NDArray[np.float64]:
        """The sum as ordinary numbers."""
        signed = total.view(f"<i{self.bits // 8}")
        result: NDArray[np.float64] = signed.astype(np.float64) * self.step
        return result

    def zeros(self, size: int) -> Vector:
        """The empty sum."""
        return np.zeros(size, dtype=self.dtype)
