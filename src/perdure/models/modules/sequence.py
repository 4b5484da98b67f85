"""Modules one after another."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def sequence(parts: dict[str, nn.Module]) -> nn.Sequential:
    """Return named parts as one module, without those that change nothing.

    A small layer takes about 30 microseconds and the call of a module one or two, so parts that
    only pass their input on would be noticed.
    """
    return nn.Sequential(OrderedDict((n, part) for n, part in parts.items() if not _idle(part)))


def _idle(part: nn.Module) -> bool:
    return isinstance(part, nn.Identity) or (isinstance(part, nn.Dropout) and part.p == 0)
