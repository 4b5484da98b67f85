"""Model inputs: stored once as uint8 or float32, normalized when a batch is gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from perdure.config import DataConfig
from perdure.core.errors import UserError

# ------------------------------------------------------------------------------------------------
# Model inputs: stored once as uint8 or float32, normalized when a batch is gathered.
# ------------------------------------------------------------------------------------------------

_CHUNK = 1 << 19  # values that are converted to int32 or to doubles at once
_ROUNDING = 1e-7
"""Relative size of deviations that float32 values have by their rounding alone."""


class RowFeatures(Protocol):
    """One vector per row that is gathered beside the row, such as cached features."""

    def gather(self, index: Tensor) -> Tensor:
        """Return the vectors of the rows at `index`: [*index.shape, size]."""


@dataclass(frozen=True)
class Inputs:
    """The rows of a data set, and their normalization.

    Example:
        >>> rows = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
        >>> plain = Inputs(rows, (2,), torch.full((2,), 1 / 255), torch.zeros(2))
        >>> plain.gather(torch.tensor([1])).mul(5).round().tolist()
        [[1.0, 2.0]]
    """

    rows: Tensor
    """uint8 or float32 [N, D]; or int32 tokens [N, D], which are not normalized."""
    shape: tuple[int, ...]
    """Shape of one example: (C, H, W), (C, L) or (F,), with D values."""
    scale: Tensor
    """Factor per value, float32 [D]."""
    shift: Tensor
    """Added per value after the factor, float32 [D]."""
    permutation: Tensor | None = None
    """int64 [D]: value j of a gathered row is value `permutation[j]` of the normalized row."""
    uniform: tuple[float, Tensor] | None = None
    """Scale and shift if they are the same for all values, which saves a pass over the batch."""
    cached_features: RowFeatures | None = None
    """Cached features of each row. If None, there are none."""

    def __len__(self) -> int:
        return self.rows.shape[0]

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.rows.device

    def gather(self, index: Tensor) -> Tensor:
        """Return the normalized rows at some positions.

        Returns:
            float32 [*index.shape, *shape]; int32 for tokens.

        """
        raw = self.rows.index_select(0, index.reshape(-1))
        if self.rows.dtype == torch.int32:
            return raw.view(*index.shape, *self.shape)
        if self.uniform is None:
            x = torch.addcmul(self.shift, raw.to(torch.float32), self.scale)
        else:
            x = torch.add(self.uniform[1], raw, alpha=self.uniform[0])
        if self.permutation is not None:
            x = x.index_select(1, self.permutation)
        return x.view(*index.shape, *self.shape)

    @property
    def black(self) -> Tensor:
        """The normalized value of a black pixel (0 before normalization), float [C]."""
        return self.shift.view(self.shape[0], -1)[:, 0]

    def gather_cached(self, index: Tensor) -> Tensor | None:
        """Return the cached features of the rows at `index`, or None if there are none."""
        return None if self.cached_features is None else self.cached_features.gather(index)

    def map(self, change: Callable[[Inputs], Inputs]) -> Inputs:
        """Return the changed inputs; `JoinedInputs.map` changes each of its parts."""
        return change(self)

    def permuted(self, permutation: Tensor | None) -> Inputs:
        """Return the inputs with the values of every row permuted (int64 [D])."""
        return replace(self, permutation=permutation)

    def to(self, device: torch.device | str) -> Inputs:
        """Return the inputs on a device; rows that are on it already are shared."""
        permutation = None if self.permutation is None else self.permutation.to(device)
        rows, scale, shift = (t.to(device) for t in (self.rows, self.scale, self.shift))
        return replace(self, rows=rows, scale=scale, shift=shift, permutation=permutation)


def make_inputs(
    train: Tensor, test: Tensor, config: DataConfig, key: str = "data"
) -> tuple[Inputs, Inputs]:
    """Return training and test inputs with one normalization."""
    shape, unit = tuple(train.shape[1:]), _unit(train)
    mean, std = normalization_constants(train, config, key)
    width = train[0].numel() // len(mean)
    scale = torch.tensor([1 / (unit * s) for s in std]).repeat_interleave(width)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).repeat_interleave(width)
    same = len(set(zip(mean, std, strict=True))) == 1
    uniform = (float(scale[0]), shift[0].clone()) if same else None
    first = Inputs(train.reshape(len(train), -1), shape, scale, shift, None, uniform)
    return first, replace(first, rows=test.reshape(len(test), -1))


def normalization_constants(
    train: Tensor, config: DataConfig, key: str
) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel; arguments as in `make_inputs`.

    Those of uint8 images refer to values from 0 to 1. Each feature of a vector of floats is a
    channel; the words of a text are one channel.
    """
    unit, channels = _unit(train), 1
    if train.dim() > 2 or train.is_floating_point():
        channels = train.shape[1]
    if config.normalize is False or train.dtype == torch.int32:
        return [0.0] * channels, [1.0] * channels
    mean, std = config.mean, config.std
    if mean is None or std is None:
        moments = float_moments if train.is_floating_point() else channel_moments
        train_mean, train_std = moments(train)
        mean = mean or [value / unit for value in train_mean]
        std = std or [value / unit for value in train_std]
    return _for_channels(mean, channels, f"{key}.mean"), _for_channels(std, channels, f"{key}.std")


def _unit(x: Tensor) -> float:
    """Return the value of x that stands for 1: 255 for uint8 images."""
    return 255.0 if x.dim() == 4 and x.dtype == torch.uint8 else 1.0


def _for_channels(values: list[float], channels: int, key: str) -> list[float]:
    if len(values) == 1:
        return values * channels
    if len(values) != channels:
        raise UserError(f"{key}: must be one value or {channels}, one per channel, got {values}")
    return values


def channel_moments(x: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel, by exact integer sums.

    A constant channel gets the deviation 1, so that it can be divided by.

    Args:
        x: uint8 images [N, C, H, W], or word counts [N, F] as one channel.

    """
    x = x.flatten(2) if x.dim() == 4 else x.unsqueeze(1)
    total = torch.zeros(x.shape[1], dtype=torch.int64)
    squares = torch.zeros(x.shape[1], dtype=torch.int64)
    for chunk in torch.split(x, max(1, _CHUNK // x[0].numel())):
        wide = chunk.to(torch.int32)
        total += wide.sum((0, 2))
        squares += wide.square_().sum((0, 2))
    count = x.shape[0] * x.shape[2]
    mean = total.double() / count
    std = (squares.double() / count - mean.square()).clamp(min=0).sqrt()
    std[std < 1e-6] = 1.0
    return mean.tolist(), std.tolist()


def float_moments(x: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel, computed in double precision.

    A channel that is constant, up to rounding, gets the deviation 1.

    Args:
        x: float32 [N, C, ...]; the features of [N, F] are channels.

    """
    x = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
    chunks = torch.split(x, max(1, _CHUNK // x[0].numel()))
    count = x.shape[0] * x.shape[2]
    mean = torch.stack([chunk.double().sum((0, 2)) for chunk in chunks]).sum(0) / count
    centered = [(chunk.double() - mean[:, None]).square_().sum((0, 2)) for chunk in chunks]
    std = (torch.stack(centered).sum(0) / count).sqrt()
    std[std <= _ROUNDING * mean.abs()] = 1.0
    return mean.tolist(), std.tolist()


# ------------------------------------------------------------------------------------------------
# Inputs of several tasks as one: each task's rows keep their permutation and normalization.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JoinedInputs:
    """The rows of several inputs, those of the first before those of the second, and so on.

    Nothing is copied: a row is gathered from the inputs that it comes from. Inputs may occur
    several times, such as the one data set that all tasks of a split stream draw from.

    Example:
        >>> rows = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
        >>> plain = Inputs(rows, (2,), torch.full((2,), 1 / 255), torch.zeros(2))
        >>> both = JoinedInputs((plain, plain.permuted(torch.tensor([1, 0]))))
        >>> both.gather(torch.tensor([1, 3])).mul(5).round().tolist()
        [[1.0, 2.0], [2.0, 1.0]]
    """

    parts: tuple[Inputs, ...]
    """The inputs in their order, with examples of one shape."""

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.parts[0].device

    @property
    def black(self) -> Tensor:
        """The normalized value of a black pixel, float [C]."""
        return self.parts[0].black

    def gather(self, index: Tensor) -> Tensor:
        """Return the normalized rows at some positions; see `Inputs.gather`."""
        return self._assemble(index, Inputs.gather)

    def gather_cached(self, index: Tensor) -> Tensor | None:
        """Return the cached features of the rows at `index`, or None if there are none."""
        if self.parts[0].cached_features is None:
            return None
        return self._assemble(index, _cached)

    def map(self, change: Callable[[Inputs], Inputs]) -> JoinedInputs:
        """Return the inputs with every part changed; a part that occurs twice is changed once."""
        changed = {id(part): change(part) for part in self._distinct}
        return JoinedInputs(tuple(changed[id(part)] for part in self.parts))

    def _assemble(self, index: Tensor, take: Callable[[Inputs, Tensor], Tensor]) -> Tensor:
        """Take rows from the parts that they come from: [*index.shape, ...]."""
        if len(self._distinct) == 1:
            return take(self._distinct[0], self._locate(index)[1])
        which, rows = self._locate(index.reshape(-1))
        used = torch.unique(which).tolist() or [0]
        places = [(which == number).nonzero().flatten() for number in used]
        taken = [take(self._distinct[n], rows[here]) for n, here in zip(used, places, strict=True)]
        values = torch.empty(len(rows), *taken[0].shape[1:]).to(taken[0])
        values[torch.cat(places)] = torch.cat(taken)
        return values.view(*index.shape, *values.shape[1:])

    def _locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each position the number of its distinct part, and the row in it."""
        ends, kinds = self._ends.to(index.device), self._kinds.to(index.device)
        part = torch.bucketize(index, ends[1:], right=True)
        return kinds[part], index - ends[part]

    @cached_property
    def _distinct(self) -> list[Inputs]:
        return list({id(part): part for part in self.parts}.values())

    @cached_property
    def _kinds(self) -> Tensor:
        """Position in `_distinct` of each part, int64 [parts]."""
        numbers = {id(part): number for number, part in enumerate(self._distinct)}
        return torch.tensor([numbers[id(part)] for part in self.parts])

    @cached_property
    def _ends(self) -> Tensor:
        """0, and the position after the last row of each part, int64 [parts + 1]."""
        return torch.tensor([0, *(len(part) for part in self.parts)]).cumsum(0)


AnyInputs = Inputs | JoinedInputs
"""Inputs of one task or of several."""


def _cached(part: Inputs, rows: Tensor) -> Tensor:
    vectors = part.gather_cached(rows)
    assert vectors is not None
    return vectors
