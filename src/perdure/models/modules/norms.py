"""The normalization layers that a network uses throughout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import nn

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
