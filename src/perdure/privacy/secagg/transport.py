"""How a server reaches the clients of secure sums, and how many of them it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

MIN_CLIENTS = 3
"""Smallest number of clients in a secure sum, at its start and when it is opened: of two, each
could read the other off the sum."""


@runtime_checkable
class SecAggTransport(Protocol):
    """The way to the clients of secure sums. The engine of a real federation is one."""

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """Return these clients' public keys for a task; clients that did not reply are absent."""
        ...

    def announce(self, sum_request: bytes) -> None:
        """Set the request that the uploads of the next exchange belong to."""
        ...

    def ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        """Send each client its request, and return the answers that arrived."""
        ...


def min_survivors(count: int, threshold: float) -> int:
    """Return how many clients must be left for a sum to be opened.

    Args:
        count: Number of sampled clients.
        threshold: Fraction of them that must be left.

    Returns:
        At least a majority, and at least `MIN_CLIENTS`.
    """
    return max(MIN_CLIENTS, count // 2 + 1, math.ceil(threshold * count - 1e-9))
