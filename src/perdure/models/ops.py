"""One forward pass, and the layer functions that models are composed of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.subspaces import project_out
from perdure.core.trees import Tensors
from perdure.models.norms import masked_norm, per_channel, plain_norm
from perdure.models.stacked import ConvGeometry, channels_last, stackable_conv, stackable_linear

# ---- One forward pass: the inputs of a model besides its parameters and its batch


@dataclass
class ForwardPass:
    """The circumstances of one forward pass, and the values that it records.

    A model is a pure function of (parameters, batch, forward pass): all its other inputs are fields
    here, and so are its other outputs (layer inputs, new running statistics). No value is drawn
    from a global generator, so a pass can be vectorized and repeated.
    """

    train: bool = False
    """Whether dropout is active."""
    buffers: Tensors = field(default_factory=dict)
    """Running statistics of batch norm, by name."""
    batch_statistics: bool = False
    """Whether batch norm uses (and records) the statistics of this batch, not the running ones."""
    key: Tensor | None = None
    """int64 scalar from which dropout noise is hashed. If None, there is no dropout."""
    mask: Tensor | None = None
    """1 for a real row, 0 for padding, float [batch]. If None, all rows are real."""
    stacked: bool = False
    """Whether the pass runs under vmap with separate weights per client."""
    under_vmap: bool = False
    """Whether the pass runs under vmap, so that no shape may depend on values. Also true if
    `stacked` is."""
    layer_inputs: Tensors | None = None
    """If a dict, the input of each weight layer is stored in it, by the name of its weight."""
    updates: Tensors = field(default_factory=dict)
    """New running statistics, by name."""
    input_projections: dict[str, Tensors] = field(default_factory=dict)
    """Subspaces of inputs that count as zero in the gradient of a linear layer's weight, by the
    weight's name. Each is a result of `Subspace.tree` or `projector` (algebra.subspaces)."""
    dropout_calls: int = 0
    """Calls of dropout so far: each hashes different noise."""


# ---- The layer functions that models are composed of
#
# Each is a pure function that runs on one client's tensors and, under vmap, on the stacked tensors
# of many clients. Further inputs and outputs are fields of the `ForwardPass`.

# The constants of the splitmix64 generator, as the signed numbers that int64 arithmetic needs.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_FRACTION_BITS = 53

PLAIN_CONV = ConvGeometry()
"""A convolution that moves by one pixel, without padding."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, fwd: ForwardPass, name: str) -> Tensor:
    """Apply a fully connected layer to the last dimension of x.

    Args:
        x: Input, float [batch, ..., inputs].
        weight: Weight, float [outputs, inputs].
        bias: Bias, float [outputs], or None.
        fwd: The forward pass, which may record or project the input.
        name: Name of the weight.

    Returns:
        The output, float [batch, ..., outputs].

    """
    if fwd.layer_inputs is not None:
        fwd.layer_inputs[name] = x
    projection = fwd.input_projections.get(name)
    if projection is None and not fwd.stacked:
        return F.linear(x, weight, bias)
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    gradient_input = None if projection is None else project_out(rows.detach(), projection)
    out = stackable_linear(rows, weight, bias, gradient_input)
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], weight.shape[0])


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    fwd: ForwardPass,
    name: str,
    geometry: ConvGeometry = PLAIN_CONV,
) -> Tensor:
    """Apply a convolution to images.

    Args:
        x: Images, float [batch, channels, height, width].
        weight: Weight, float [outputs, channels / groups, height, width].
        bias: Bias, float [outputs], or None.
        fwd: The forward pass, which may record the input.
        name: Name of the weight.
        geometry: Stride, padding, dilation and groups.

    """
    if fwd.layer_inputs is not None:
        fwd.layer_inputs[name] = x
    stride, padding, *_ = geometry.args
    if stride != (1, 1) and padding == (0, 0) and weight.shape[-2:] == (1, 1):
        # Equivalent, since a 1x1 kernel skips the pixels between steps. With a stride in the
        # convolution, torch 2.13's gradient of channels-last images overruns its memory.
        x, geometry = x[:, :, :: stride[0], :: stride[1]], replace(geometry, stride=(1, 1))
    if fwd.stacked:
        return stackable_conv(x, weight, bias, geometry)
    return F.conv2d(x if fwd.under_vmap else channels_last(x), weight, bias, *geometry.args)


def dropout(x: Tensor, p: float, fwd: ForwardPass) -> Tensor:
    """Zero each element with probability p and scale up the others, while training.

    The noise is a hash of (key, index of the dropout call, position in x) rather than a draw, so
    that a client gets the same mask alone, stacked with others, or with padding rows at the end.
    """
    if not fwd.train or p == 0 or fwd.key is None:
        return x
    call, fwd.dropout_calls = fwd.dropout_calls, fwd.dropout_calls + 1
    keep = uniform_bits(fwd.key, call, math.prod(x.shape), x.device) >= _threshold(p)
    return x * keep.reshape(x.shape).to(x.dtype).mul(1 / (1 - p))


def _threshold(p: float) -> int:
    return int(p * (1 << _FRACTION_BITS))


def uniform_bits(key: Tensor, call: int, count: int, device: torch.device) -> Tensor:
    """Return `count` int64 numbers, uniform on [0, 2^53), that depend on the arguments alone."""
    start = _mix(key.to(device) + _wrap((call + 1) * _GOLDEN))
    numbers = _mix(torch.arange(count, device=device) * _GOLDEN + start)
    return _shift(numbers, 64 - _FRACTION_BITS)


def _mix(value: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64: each bit of the result depends on every input bit."""
    value = (value ^ _shift(value, 30)) * _MIX_1
    value = (value ^ _shift(value, 27)) * _MIX_2
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right logically: on int64, >> copies the sign, which the mask removes."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _wrap(number: int) -> int:
    """Return a Python integer wrapped into the range of int64, as its arithmetic would."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def batch_norm(
    x: Tensor,
    fwd: ForwardPass,
    weight: Tensor | None,
    bias: Tensor | None,
    name: str | None,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize each channel over the batch, or by the running statistics in `fwd.buffers`.

    Rows with `fwd.mask` 0 are left out of the statistics.

    Args:
        x: Values, float [batch, channels, ...].
        fwd: The forward pass, which says whether the batch's statistics are used.
        weight: Scale of each channel. If None, 1.
        bias: Shift of each channel. If None, 0.
        name: Prefix of its running statistics. If None, it has none and always uses the batch's.
        momentum: Weight of the batch in the new running statistics.
        eps: Added to the variance.

    """
    weight = x.new_ones(x.shape[1]) if weight is None else weight
    bias = x.new_zeros(x.shape[1]) if bias is None else bias
    if name is not None and not fwd.batch_statistics:
        return _by_running(x, fwd, weight, bias, name, eps)
    out, mean, var, counts = _by_batch(x, fwd, weight, bias, eps)
    if name is not None:
        _record(fwd, name, mean, var, momentum * counts)
    return out


def _by_batch(
    x: Tensor, fwd: ForwardPass, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | int]:
    """Return normalized values; mean and unbiased variance; 1, or 0 if all rows are padding."""
    pixels = math.prod(x.shape[2:])
    values = len(x) * pixels
    # A single value per channel is normalized to exactly the bias; torch's kernel returns noise
    # around it, and after a bias of 0 a ReLU would turn that into a coin toss.
    if fwd.mask is None and not (fwd.stacked or fwd.under_vmap) and values > 1:
        out, mean, var = plain_norm(x, weight, bias, eps)
        return out, mean, var * (values / (values - 1)), 1
    mask = x.new_ones(len(x)) if fwd.mask is None else fwd.mask.to(x.dtype)
    count = mask.sum() * pixels
    row_weights = (mask / count.clamp(min=1)).reshape(-1, *[1] * (x.dim() - 1))
    out, mean, var = masked_norm(x, weight, bias, row_weights, eps)
    return out, mean, var * (count / (count - 1).clamp(min=1)), count.clamp(max=1)


def _record(fwd: ForwardPass, name: str, mean: Tensor, var: Tensor, step: Tensor | float) -> None:
    """Move the running statistics towards the batch's by `step`, which is 0 for an empty batch."""
    for statistic, value in ("running_mean", mean), ("running_var", var):
        old = fwd.buffers[f"{name}.{statistic}"]
        fwd.updates[f"{name}.{statistic}"] = torch.lerp(old, value, step)


def _by_running(
    x: Tensor, fwd: ForwardPass, weight: Tensor, bias: Tensor, name: str, eps: float
) -> Tensor:
    factor = weight * torch.rsqrt(fwd.buffers[f"{name}.running_var"] + eps)
    shift = bias - fwd.buffers[f"{name}.running_mean"] * factor
    return x * per_channel(factor, x) + per_channel(shift, x)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    fwd: ForwardPass,
    eps: float = 1e-5,
) -> Tensor:
    """Normalize groups of channels within each row.

    Args:
        x: Values, float [batch, channels, ...].
        groups: Number of groups.
        weight: Scale of each channel. If None, 1.
        bias: Shift of each channel. If None, 0.
        fwd: The forward pass.
        eps: Added to the variance.

    """
    # torch.group_norm, unlike the one in F, takes a single row with groups of a single value
    if not fwd.stacked or weight is None:
        return torch.group_norm(x, groups, weight, bias, eps)
    # All clients' rows are normalized together; only the scale differs between clients. Under vmap
    # torch 2.13 cannot normalize images in channels-last layout.
    scaled = torch.group_norm(x.contiguous(), groups, eps=eps) * per_channel(weight, x)
    return scaled if bias is None else scaled + per_channel(bias, x)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the cross-entropy of each row, since F.cross_entropy is slow under vmap.

    Args:
        logits: Logits, float [..., outputs].
        y: Output of each row's class, int64 [...].

    """
    picked = F.log_softmax(logits, dim=-1).gather(-1, y.unsqueeze(-1))
    return -picked.squeeze(-1)
