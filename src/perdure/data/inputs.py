"""Rows that stay uint8 in memory once, and what is done to a batch when it is gathered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from perdure.config import DataConfig
from perdure.core.errors import UserError

_CHUNK = 1 << 19  # values that are widened at a time


class RowFeatures(Protocol):
    """Something of each row that is gathered beside the row itself."""

    def gather(self, index: Tensor) -> Tensor:
        """What belongs to the rows at `index`: [*index.shape, size]."""


@dataclass(frozen=True)
class Inputs:
    """The rows of a data set and how they become the input of a model.

    >>> rows = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
    >>> plain = Inputs(rows, (2,), torch.full((2,), 1 / 255), torch.zeros(2))
    >>> plain.gather(torch.tensor([1])).mul(5).round().tolist()
    [[1.0, 2.0]]
    """

    rows: Tensor
    """uint8 [N, D]; or int32 [N, D], token numbers, which are given as they are."""
    shape: tuple[int, ...]
    """(C, H, W) or (F,): what the D values of a row are."""
    scale: Tensor
    """float32 [D]"""
    shift: Tensor
    """float32 [D]"""
    permutation: Tensor | None = None
    """int64 [D]: place j of a gathered row is place permutation[j] of the normalised row."""
    uniform: tuple[float, Tensor] | None = None
    """Scale and shift where they are the same everywhere, which saves a pass over the batch."""
    cached_features: RowFeatures | None = None
    """What a model may know of each row beforehand (data.known)."""

    def __len__(self) -> int:
        return self.rows.shape[0]

    def gather(self, index: Tensor) -> Tensor:
        """The rows at `index` (on the device of the rows), float32 [*index.shape, *shape]."""
        raw = self.rows.index_select(0, index.reshape(-1))
        if self.rows.dtype != torch.uint8:
            return raw.view(*index.shape, *self.shape)
        if self.uniform is None:
            x = torch.addcmul(self.shift, raw.to(torch.float32), self.scale)
        else:
            x = torch.add(self.uniform[1], raw, alpha=self.uniform[0])
        if self.permutation is not None:
            x = x.index_select(1, self.permutation)
        return x.view(*index.shape, *self.shape)

    def gather_cached(self, index: Tensor) -> Tensor | None:
        """What is known of the rows at `index`, if anything is."""
        return None if self.cached_features is None else self.cached_features.gather(index)

    def permuted(self, permutation: Tensor | None) -> Inputs:
        """The same rows, with their places in another order."""
        return replace(self, permutation=permutation)

    def to(self, device: torch.device | str) -> Inputs:
        """The same inputs on a device (the rows are shared if they are there already)."""
        order = None if self.permutation is None else self.permutation.to(device)
        rows, scale, shift = (t.to(device) for t in (self.rows, self.scale, self.shift))
        return replace(self, rows=rows, scale=scale, shift=shift, permutation=order)


def make_inputs(
    train: Tensor, test: Tensor, config: DataConfig, key: str = "data"
) -> tuple[Inputs, Inputs]:
    """Training and test inputs with one normalisation, that of the config or of the training rows.

    Images count as values of 0 to 1, word counts as they are.
    """
    shape = tuple(train.shape[1:])
    unit = 255.0 if len(shape) == 3 else 1.0
    mean, std = constants(train, config, key)
    width = train[0].numel() // len(mean)
    scale = torch.tensor([1 / (unit * s) for s in std]).repeat_interleave(width)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).repeat_interleave(width)
    same = len(set(zip(mean, std, strict=True))) == 1
    uniform = (float(scale[0]), shift[0].clone()) if same else None
    first = Inputs(train.reshape(len(train), -1), shape, scale, shift, None, uniform)
    return first, replace(first, rows=test.reshape(len(test), -1))


def constants(train: Tensor, config: DataConfig, key: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, from the config or from the training rows."""
    unit = 255.0 if train.dim() == 4 else 1.0
    channels = train.shape[1] if train.dim() == 4 else 1
    if config.normalize is False or train.dtype != torch.uint8:
        return [0.0] * channels, [1.0] * channels
    mean, std = config.mean, config.std
    if mean is None or std is None:
        found_mean, found_std = moments(train)
        mean = mean or [value / unit for value in found_mean]
        std = std or [value / unit for value in found_std]
    return _for_channels(mean, channels, f"{key}.mean"), _for_channels(std, channels, f"{key}.std")


def _for_channels(values: list[float], channels: int, key: str) -> list[float]:
    if len(values) == 1:
        return values * channels
    if len(values) != channels:
        raise UserError(f"{key}: must be one value, or one for each of {channels}, got {values}")
    return values


def moments(x: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, exact sums, without a float copy of the rows.

    A channel that is constant gets the deviation 1, so that it can be divided by.
    """
    x = x.flatten(2) if x.dim() == 4 else x.unsqueeze(1)
    total = torch.zeros(x.shape[1], dtype=torch.int64)
    squares = torch.zeros(x.shape[1], dtype=torch.int64)
    for part in torch.split(x, max(1, _CHUNK // x[0].numel())):
        wide = part.to(torch.int32)
        total += wide.sum((0, 2))
        squares += wide.square_().sum((0, 2))
    count = x.shape[0] * x.shape[2]
    mean = total.double() / count
    std = (squares.double() / count - mean.square()).clamp(min=0).sqrt()
    std[std < 1e-6] = 1.0
    return mean.tolist(), std.tolist()
