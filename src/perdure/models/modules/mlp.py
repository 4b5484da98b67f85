"""A multi-layer perceptron of any depth, and the sequences and norms that networks are made of."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn

# ------------------------------------------------------------------------------------------------
# Modules one after another.
# ------------------------------------------------------------------------------------------------


def sequence(parts: dict[str, nn.Module]) -> nn.Sequential:
    """Return named parts as one module, without those that change nothing.

    A small layer takes about 30 microseconds and the call of a module one or two, so parts that
    only pass their input on would be noticed.
    """
    return nn.Sequential(OrderedDict((n, part) for n, part in parts.items() if not _idle(part)))


def _idle(part: nn.Module) -> bool:
    return isinstance(part, nn.Identity) or (isinstance(part, nn.Dropout) and part.p == 0)


# ------------------------------------------------------------------------------------------------
# The normalization layers that a network uses throughout.
# ------------------------------------------------------------------------------------------------

NormKind = Literal["batch", "group", "none"]


@dataclass(frozen=True)
class Norm:
    """The kind of a network's normalization layers: batch, group or none."""

    kind: NormKind
    """Batch norm, group norm, or no normalization."""
    running_stats: bool = True
    """Whether batch norm has running statistics. If not, it always uses those of the batch."""

    def for_rows(self, channels: int) -> nn.Module:
        """Return a layer for values [batch, channels]."""
        if self.kind == "batch":
            return nn.BatchNorm1d(channels, track_running_stats=self.running_stats)
        return self._without_batch(channels)

    def for_images(self, channels: int) -> nn.Module:
        """Return a layer for images [batch, channels, height, width]."""
        if self.kind == "batch":
            return nn.BatchNorm2d(channels, track_running_stats=self.running_stats)
        return self._without_batch(channels)

    def _without_batch(self, channels: int) -> nn.Module:
        if self.kind == "group":
            return nn.GroupNorm(group_count(channels), channels)
        return nn.Identity()


NO_NORM = Norm("none")


def group_count(channels: int) -> int:
    """Return the groups of a group norm: the largest common divisor of 8 and the channels."""
    return math.gcd(channels, 8)


# ------------------------------------------------------------------------------------------------
# A multi-layer perceptron of any depth.
# ------------------------------------------------------------------------------------------------


def mlp(
    inputs: int,
    hidden: tuple[int, ...],
    dropout: tuple[float, ...],
    norm: Norm = NO_NORM,
    bias: bool = True,
) -> nn.Sequential:
    """Return fully connected layers with ReLU, fc1, fc2, ..., for rows of any shape."""
    start: dict[str, nn.Module] = {"flatten": nn.Flatten(), "drop0": nn.Dropout(dropout[0])}
    return sequence(start | hidden_layers((inputs, *hidden), dropout[1:], norm, bias))


def hidden_layers(
    sizes: tuple[int, ...], dropout: tuple[float, ...], norm: Norm, bias: bool, before: int = 0
) -> dict[str, nn.Module]:
    """Return the parts of hidden layers by name: fc1 with norm, ReLU and dropout, fc2, ..."""
    parts: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        parts |= {
            f"fc{i}": nn.Linear(inputs, outputs, bias),
            f"bn{before + i}": norm.for_rows(outputs),
            f"relu{before + i}": nn.ReLU(),
            f"drop{before + i}": nn.Dropout(dropout[i - 1]),
        }
    return parts
