"""The participants of secure sums as a server reaches them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

MIN_CLIENTS = 3
"""Clients in a secure sum: of two, each would read the other's values off the sum."""


@runtime_checkable
class SecAggTransport(Protocol):
    """The participants as a server reaches them. An engine of a real federation is one."""

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """The keys of these clients for a task, those that answered."""
        ...

    def announce(self, call: bytes) -> None:
        """The call that the uploads of the next training or extra round belong to."""
        ...

    def ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        """Send each client its request; the answers that came."""
        ...


def min_survivors(count: int, threshold: float) -> int:
    """Clients that must be left of so many: a majority, and never one alone."""
    return max(2, count // 2 + 1, math.ceil(threshold * count - 1e-9))
