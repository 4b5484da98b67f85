"""The few layer functions that models are written in.

Each is a pure function that runs alike on one client's tensors and, under vmap, on the stacked
tensors of many; what it needs to know of the pass, and what it has to tell, goes through Pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.models.passes import Pass
from perdure.models.stacked import lifted_linear
from perdure.trees import Tensors

# The constants of the splitmix64 generator, as the signed numbers that int64 arithmetic needs.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_FRACTION_BITS = 53


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, run: Pass, name: str) -> Tensor:
    """A fully connected layer on the last dimension of x; `name` is that of the weight."""
    _tap(x, run, name)
    if not run.lifted:
        return F.linear(x, weight, bias)
    if x.dim() == 2:
        return lifted_linear(x, weight, bias)
    rows = lifted_linear(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    run: Pass,
    name: str,
    stride: int = 1,
    padding: int = 0,
) -> Tensor:
    """A convolution of images [batch, channels, height, width]; `name` is that of the weight."""
    _tap(x, run, name)
    return F.conv2d(x, weight, bias, stride=stride, padding=padding)


def _tap(x: Tensor, run: Pass, name: str) -> None:
    if run.taps is not None:
        run.taps[name] = x


def dropout(x: Tensor, p: float, run: Pass) -> Tensor:
    """Zero each element with probability p and scale up the rest, while training.

    The noise is a hash of (key, place in the model, position in x) rather than a draw, so that a
    client gets the same mask alone, stacked with others, or with padding rows after its own.
    """
    if not run.train or p == 0 or run.key is None:
        return x
    place, run.draws = run.draws, run.draws + 1
    keep = uniform_bits(run.key, place, math.prod(x.shape), x.device) >= _threshold(p)
    return x * keep.reshape(x.shape).to(x.dtype).mul(1 / (1 - p))


def _threshold(p: float) -> int:
    return int(p * (1 << _FRACTION_BITS))


def uniform_bits(key: Tensor, place: int, count: int, device: torch.device) -> Tensor:
    """`count` int64 numbers, uniform on [0, 2^53), that depend on nothing but the arguments."""
    start = _mix(key.to(device) + _wrap((place + 1) * _GOLDEN))
    numbers = _mix(torch.arange(count, device=device) * _GOLDEN + start)
    return _shift(numbers, 64 - _FRACTION_BITS)


def _mix(value: Tensor) -> Tensor:
    """The finaliser of splitmix64: each bit of the result depends on each bit of the value."""
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right: on int64, >> copies the sign, which the mask takes away."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _wrap(number: int) -> int:
    """A Python integer brought into the range of int64 as its arithmetic would."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def batch_norm(
    x: Tensor,
    run: Pass,
    params: Tensors,
    name: str,
    momentum: float = 0.1,
    eps: float = 1e-5,
    running_stats: bool = True,
) -> Tensor:
    """Normalise each channel over the batch, or by running statistics from run.buffers.

    Rows whose run.mask is 0 do not count. Without running_stats the batch's own statistics are
    used in every pass and nothing is recorded.
    """
    if running_stats and not run.batch_statistics:
        mean, var = run.buffers[f"{name}.running_mean"], run.buffers[f"{name}.running_var"]
        return _scale(x, mean, var, params, name, eps)
    mean, var, count = _statistics(x, run.mask)
    if running_stats:
        _record(run, name, mean.detach(), var.detach(), count, momentum)
    return _scale(x, mean, var, params, name, eps)


def _statistics(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean, biased variance and number of values of each channel, over rows that count."""
    dims = [0, *range(2, x.dim())]
    if mask is None:
        var, mean = torch.var_mean(x, dims, correction=0)
        return mean, var, math.prod(x.shape) // x.shape[1]
    weight = mask.reshape(-1, *[1] * (x.dim() - 1))
    count = mask.sum() * math.prod(x.shape[2:])
    share = weight / count.clamp(min=1)
    mean = (x * share).sum(dims)
    centred = x - _channels(mean, x)
    return mean, (centred.square() * share).sum(dims), count


def _record(
    run: Pass, name: str, mean: Tensor, var: Tensor, count: Tensor | int, momentum: float
) -> None:
    """Move the running statistics towards the batch's; a batch without rows leaves them alone."""
    unbiased: Tensor | float
    step: Tensor | float
    if isinstance(count, int):
        unbiased, step = count / max(count - 1, 1), momentum
    else:
        unbiased, step = count / (count - 1).clamp(min=1), momentum * (count > 0)
    for part, value in ("running_mean", mean), ("running_var", var * unbiased):
        old = run.buffers[f"{name}.{part}"]
        run.updates[f"{name}.{part}"] = old + step * (value - old)


def _scale(x: Tensor, mean: Tensor, var: Tensor, params: Tensors, name: str, eps: float) -> Tensor:
    factor = params[f"{name}.weight"] * torch.rsqrt(var + eps)
    shift = params[f"{name}.bias"] - mean * factor
    return x * _channels(factor, x) + _channels(shift, x)


def _channels(value: Tensor, like: Tensor) -> Tensor:
    return value.reshape(-1, *[1] * (like.dim() - 2))


def group_norm(x: Tensor, params: Tensors, name: str, groups: int, eps: float = 1e-5) -> Tensor:
    """Normalise groups of channels within each row."""
    return F.group_norm(x, groups, params[f"{name}.weight"], params[f"{name}.bias"], eps)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The loss of each row. (F.cross_entropy has no fast form under vmap.)"""
    picked = F.log_softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1))
    return -picked.squeeze(-1)
