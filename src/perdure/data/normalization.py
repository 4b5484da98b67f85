"""Normalization of sources: mean and deviation of the training data, or those of the config."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from perdure.config import DataConfig
from perdure.core.errors import UserError
from perdure.data.examples import Examples, Normalization, NumberScale, Source

_CHUNK = 1 << 19  # values that are converted to int32 or to doubles at once
_ROUNDING = 1e-7
"""Relative size of deviations that float32 values have by their rounding alone."""


def normalize_source(
    source: Source, config: DataConfig, key: str = "data", offset: int = 0
) -> Source:
    """Return a source whose rows are normalized when they are gathered.

    Args:
        source: A source as it was read.
        config: The section with mean and std. Those that it lacks are those of the training rows.
        key: Key of the section, for messages.
        offset: Where the labels of the source begin in the label space of the stream.

    """
    normalization = make_normalization(source.train.x, config, key)
    return with_normalization(source, normalization, number_scale(source.train.y, config), offset)


def with_normalization(
    source: Source,
    normalization: Normalization | None,
    numbers: NumberScale | None,
    offset: int = 0,
) -> Source:
    """Return a source with a normalization of its rows and, if targets are numbers, of them."""

    def normalized(part: Examples) -> Examples:
        y = part.y + offset if numbers is None else numbers.standardize(part.y)
        return replace(part, x=part.x.contiguous(), y=y, normalization=normalization)

    return replace(source.map(normalized), numbers=numbers)


def make_normalization(train: Tensor, config: DataConfig, key: str = "data") -> Normalization:
    """Return the normalization of training rows [N, ...] as a section of a config asks for it."""
    unit = _unit(train)
    mean, std = normalization_constants(train, config, key)
    width = train[0].numel() // len(mean)
    scale = torch.tensor([1 / (unit * s) for s in std]).repeat_interleave(width)
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)]).repeat_interleave(width)
    same = len(set(zip(mean, std, strict=True))) == 1
    return Normalization(scale, shift, (float(scale[0]), shift[0].clone()) if same else None)


def normalization_constants(
    train: Tensor, config: DataConfig, key: str
) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel; as in `make_normalization`.

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


def number_scale(y: Tensor, config: DataConfig) -> NumberScale | None:
    """Return the scale of training targets, or None if they are labels of classes.

    Args:
        y: Targets of the training data: int64 labels, or double [rows].
        config: The section with `target_mean` and `target_std`. If None, they are those of `y`.

    """
    if not y.is_floating_point():
        return None
    mean, std = config.target_mean, config.target_std
    mean = float(y.double().mean()) if mean is None else mean
    return NumberScale(mean, std or _deviation(y.double()))


def _deviation(y: Tensor) -> float:
    """Return the standard deviation, or 1 of numbers that are all the same."""
    return float(y.std(correction=0)) or 1.0
