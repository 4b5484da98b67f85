"""A convolution with separate weights per client.

vmap uses one grouped convolution, which is best for tiny images, where launching an operation takes
longer than running it. For larger images, copying into the grouped layout and back takes longer
than it saves, so there is one convolution per client, in channels-last layout, in which convolution
and pooling are fastest on a CPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.models.stacked_linear import client_axis_first

_TINY = 2_000_000
"""Multiplications per client below which the grouped form is faster (measured)."""

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None, None]


class _Conv(torch.autograd.Function):
    """What the layer of one client and that of a stack save for their gradients."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors that the gradients need."""
        ctx.save_for_backward(*inputs[:2])
        ctx.stride, ctx.padding = inputs[3:]


class StackableConv(_Conv):
    """F.conv2d; under vmap it becomes a `StackedConv`."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
    ) -> Tensor:
        """Return the output of one client's layer."""
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Return the gradients of one client's layer."""
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return (*_backward(grads[0], x, weight, ctx.stride, ctx.padding, 1, needs), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Return the outputs of all clients' layers."""
        (x, weight, bias, stride, padding), size = inputs, info.batch_size
        x = client_axis_first(x, in_dims[0], size)
        if in_dims[1] is None and in_dims[2] is None:  # one weight for all: one tall batch
            out = F.conv2d(x.flatten(0, 1), weight, bias, stride, padding)
            return _split(out, size), 0
        weight = client_axis_first(weight, in_dims[1], size)
        bias = bias if bias is None else client_axis_first(bias, in_dims[2], size)
        return _stacked_conv(x, weight, bias, stride, padding), 0


class StackedConv(_Conv):
    """One convolution per client: x [K, B, C, H, W], weight [K, out, C, k, k], bias [K, out]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
    ) -> Tensor:
        """Apply one grouped convolution, or one per client."""
        if _is_tiny(x, weight, stride):
            flat = bias if bias is None else bias.flatten()
            args = (flat, stride, padding, 1, len(x))
            return _separate(F.conv2d(_side_by_side(x), weight.flatten(0, 1), *args), len(x))
        biases = [None] * len(x) if bias is None else bias.unbind()
        outputs = [
            F.conv2d(channels_last(image), w, b, stride, padding)
            for image, w, b in zip(x.unbind(), weight.unbind(), biases, strict=True)
        ]
        return _split(torch.cat(outputs), len(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Return the gradients of all clients' layers, each only if it is needed."""
        x, weight = ctx.saved_tensors
        backward = _grouped_backward if _is_tiny(x, weight, ctx.stride) else _looped_backward
        needs = ctx.needs_input_grad[:3]
        return (*backward(grads[0], x, weight, ctx.stride, ctx.padding, needs), None, None)


_OptionalTensors = tuple[Tensor | None, Tensor | None, Tensor | None]
_Needs = tuple[bool, ...]


def _grouped_backward(
    grad: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, needs: _Needs
) -> _OptionalTensors:
    clients = len(x)
    flat = weight.flatten(0, 1)
    args = (stride, padding, clients, needs)
    for_x, for_weight, for_bias = _backward(_side_by_side(grad), _side_by_side(x), flat, *args)
    return (
        None if for_x is None else _separate(for_x, clients),
        None if for_weight is None else _split(for_weight, clients),
        None if for_bias is None else _split(for_bias, clients),
    )


def _looped_backward(
    grad: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, needs: _Needs
) -> _OptionalTensors:
    clients = zip(grad.unbind(), x.unbind(), weight.unbind(), strict=True)
    grads = [_backward(g, channels_last(i), w, stride, padding, 1, needs) for g, i, w in clients]
    for_x, for_weight, for_bias = (
        [value for value in column if value is not None] for column in zip(*grads, strict=True)
    )
    return (
        _split(torch.cat(for_x), len(x)) if for_x else None,
        torch.stack(for_weight) if for_weight else None,
        torch.stack(for_bias) if for_bias else None,
    )


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int, groups: int, needs: _Needs
) -> _OptionalTensors:
    sizes = ([len(weight)], [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    backward = torch.ops.aten.convolution_backward
    for_x, for_weight, for_bias = backward(grad, x, weight, *sizes, list(needs))
    return (
        for_x if needs[0] else None,
        for_weight if needs[1] else None,
        for_bias if needs[2] else None,
    )


def stackable_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    """Return F.conv2d, in a form that is fast with separate weights per client under vmap."""
    result: Tensor = StackableConv.apply(x, weight, bias, stride, padding)  # type: ignore[no-untyped-call]
    return result


def _stacked_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    result: Tensor = StackedConv.apply(x, weight, bias, stride, padding)  # type: ignore[no-untyped-call]
    return result


def channels_last(x: Tensor) -> Tensor:
    """Return the images [batch, C, H, W] in channels-last memory layout."""
    if x.device.type == "mps":
        return x
    if x.shape[1] == 1:  # the bytes are the same: only the strides differ
        return x.reshape(len(x), *x.shape[2:], 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


def _is_tiny(x: Tensor, weight: Tensor, stride: int) -> bool:
    pixels = x.shape[1] * x.shape[3] * x.shape[4] // stride**2
    return pixels * math.prod(weight.shape[1:]) < _TINY


def _split(rows: Tensor, clients: int) -> Tensor:
    """Return rows of all clients, ordered by client, as [K, rows, ...]."""
    return rows.reshape(clients, -1, *rows.shape[1:])


def _side_by_side(x: Tensor) -> Tensor:
    """Return [K, B, C, H, W] as [B, K * C, H, W]."""
    return x.transpose(0, 1).flatten(1, 2)


def _separate(x: Tensor, clients: int) -> Tensor:
    """Return [B, K * C, H, W] as [K, B, C, H, W]."""
    return x.reshape(len(x), clients, -1, *x.shape[2:]).transpose(0, 1)
