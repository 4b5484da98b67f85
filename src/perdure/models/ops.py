"""The few layer functions that models are written in.

Each is a pure function that runs alike on one client's tensors and, under vmap, on the stacked
tensors of many; what it needs to know of the pass, and what it has to tell, goes through Pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.subspaces import project_out
from perdure.core.trees import Tensors
from perdure.models.forward_pass import ForwardPass
from perdure.models.masked_norm import masked_norm, per_channel
from perdure.models.plain_norm import plain_norm
from perdure.models.stacked_conv import channels_last, stackable_conv
from perdure.models.stacked_linear import stackable_linear

# The constants of the splitmix64 generator, as the signed numbers that int64 arithmetic needs.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_FRACTION_BITS = 53


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, fwd: ForwardPass, name: str) -> Tensor:
    """A fully connected layer on the last dimension of x; `name` is that of the weight."""
    _record_input(x, fwd, name)
    guard = fwd.input_projections.get(name)
    if guard is None and not fwd.stacked:
        return F.linear(x, weight, bias)
    if x.dim() == 2:
        return _stackable(x, weight, bias, guard)
    rows = _stackable(x.reshape(-1, x.shape[-1]), weight, bias, guard)
    return rows.reshape(*x.shape[:-1], weight.shape[0])


def _stackable(x: Tensor, weight: Tensor, bias: Tensor | None, guard: Tensors | None) -> Tensor:
    seen = None if guard is None else project_out(x.detach(), guard)
    return stackable_linear(x, weight, bias, seen)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fwd: ForwardPass,
    name: str,
    stride: int = 1,
    padding: int = 0,
) -> Tensor:
    """A convolution of images [batch, channels, height, width]; `name` is that of the weight."""
    _record_input(x, fwd, name)
    if weight.shape[-1] == 1 and padding == 0 and stride > 1:
        # The same thing, since pixels between steps are never looked at. With the stride left to
        # the convolution, torch 2.13's gradient of channels-last images overruns its memory.
        x, stride = x[:, :, ::stride, ::stride], 1
    if fwd.stacked:
        return stackable_conv(x, weight, bias, stride, padding)
    return F.conv2d(x if fwd.under_vmap else channels_last(x), weight, bias, stride, padding)


def _record_input(x: Tensor, fwd: ForwardPass, name: str) -> None:
    if fwd.layer_inputs is not None:
        fwd.layer_inputs[name] = x


def dropout(x: Tensor, p: float, fwd: ForwardPass) -> Tensor:
    """Zero each element with probability p and scale up the rest, while training.

    The noise is a hash of (key, place in the model, position in x) rather than a draw, so that a
    client gets the same mask alone, stacked with others, or with padding rows after its own.
    """
    if not fwd.train or p == 0 or fwd.key is None:
        return x
    place, fwd.dropout_calls = fwd.dropout_calls, fwd.dropout_calls + 1
    keep = uniform_bits(fwd.key, place, math.prod(x.shape), x.device) >= _threshold(p)
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
    fwd: ForwardPass,
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
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    if running_stats and not fwd.batch_statistics:
        return _by_running(x, fwd, weight, bias, name, eps)
    out, mean, var, counts = _by_batch(x, fwd, weight, bias, eps)
    if running_stats:
        _record(fwd, name, mean, var, momentum * counts)
    return out


def _by_batch(
    x: Tensor, fwd: ForwardPass, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | int]:
    """Normalised values; mean and unbiased variance; 1, or 0 where no row counts."""
    pixels = math.prod(x.shape[2:])
    values = len(x) * pixels
    # One value a channel is its bias exactly; torch's kernel returns noise around it, from which
    # a ReLU after a bias of 0 would make a coin toss.
    if fwd.mask is None and not (fwd.stacked or fwd.under_vmap) and values > 1:
        out, mean, var = plain_norm(x, weight, bias, eps)
        return out, mean, var * (values / (values - 1)), 1
    mask = x.new_ones(len(x)) if fwd.mask is None else fwd.mask.to(x.dtype)
    count = mask.sum() * pixels
    share = (mask / count.clamp(min=1)).reshape(-1, *[1] * (x.dim() - 1))
    out, mean, var = masked_norm(x, weight, bias, share, eps)
    return out, mean, var * (count / (count - 1).clamp(min=1)), count.clamp(max=1)


def _record(fwd: ForwardPass, name: str, mean: Tensor, var: Tensor, step: Tensor | float) -> None:
    """Move the running statistics towards the batch's; a batch without rows leaves them alone."""
    for part, value in ("running_mean", mean), ("running_var", var):
        old = fwd.buffers[f"{name}.{part}"]
        fwd.updates[f"{name}.{part}"] = torch.lerp(old, value, step)


def _by_running(
    x: Tensor, fwd: ForwardPass, weight: Tensor, bias: Tensor, name: str, eps: float
) -> Tensor:
    factor = weight * torch.rsqrt(fwd.buffers[f"{name}.running_var"] + eps)
    shift = bias - fwd.buffers[f"{name}.running_mean"] * factor
    return x * per_channel(factor, x) + per_channel(shift, x)


def group_norm(
    x: Tensor, fwd: ForwardPass, params: Tensors, name: str, groups: int, eps: float = 1e-5
) -> Tensor:
    """Normalise groups of channels within each row."""
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    if not fwd.stacked:
        return F.group_norm(x, groups, weight, bias, eps)
    # Clients' rows are normalised in one go; only the scale differs between clients.
    standard = F.group_norm(x, groups, eps=eps)
    return standard * per_channel(weight, x) + per_channel(bias, x)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The loss of each row. (F.cross_entropy has no fast form under vmap.)"""
    picked = F.log_softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1))
    return -picked.squeeze(-1)
