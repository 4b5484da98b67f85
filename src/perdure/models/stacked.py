"""Convolutions and linear layers with separate weights per client."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# ---- A linear layer whose vectorized form is a few batched matrix products
#
# vmap turns a linear layer with one weight per client into products of transposed views, and the
# weight's gradient gets a layout that slows every later step down. Here the stacked forward pass is
# one baddbmm, and each gradient is one contiguous product.
#
# The weight's gradient may use other inputs than the forward pass. With a projection P of the
# inputs x, the weight's gradient grad^T (x P) equals (grad^T x) P: the gradient is projected at the
# price of projecting one batch.

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None]


class _Linear(torch.autograd.Function):
    """What the layer of one client and that of a stack save for their gradients."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the weight and the input of its gradient."""
        x, weight, _, gradient_input = inputs
        ctx.save_for_backward(x if gradient_input is None else gradient_input, weight)


class StackableLinear(_Linear):
    """x @ weight.T + bias for x of two dimensions; under vmap it becomes a `StackedLinear`.

    `gradient_input` replaces x in the weight's gradient, unless it is None.
    """

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, gradient_input: Tensor | None
    ) -> Tensor:
        """Return the output of one client's layer."""
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Return the gradients of one client's layer, each only if it is needed."""
        gradient_input, weight = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0]
        return (
            grad @ weight if needs[0] else None,
            grad.t() @ gradient_input if needs[1] else None,
            grad.sum(0) if needs[2] else None,
            None,
        )

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_input: Tensor | None,
    ) -> tuple[Tensor, int]:
        """Return the outputs of all clients' layers."""
        x = client_axis_first(x, in_dims[0], info.batch_size)
        if in_dims[1] is None and in_dims[2] is None and gradient_input is None:
            return F.linear(x, weight, bias), 0  # one weight for all: one tall product
        weight = client_axis_first(weight, in_dims[1], info.batch_size)
        bias, gradient_input = (
            None if value is None else client_axis_first(value, dim, info.batch_size)
            for value, dim in zip((bias, gradient_input), in_dims[2:], strict=True)
        )
        result: Tensor = StackedLinear.apply(x, weight, bias, gradient_input)  # type: ignore[no-untyped-call]
        return result, 0


class StackedLinear(_Linear):
    """One linear layer per client: x [K, B, in], weight [K, out, in], bias [K, out]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, gradient_input: Tensor | None
    ) -> Tensor:
        """Return one batched product for all clients."""
        matrix = weight.transpose(1, 2)
        return torch.bmm(x, matrix) if bias is None else torch.baddbmm(bias[:, None], x, matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Return the gradients of all clients' layers, each only if it is needed."""
        gradient_input, weight = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0]
        return (
            torch.bmm(grad, weight) if needs[0] else None,
            torch.bmm(grad.transpose(1, 2), gradient_input) if needs[1] else None,
            grad.sum(1) if needs[2] else None,
            None,
        )


def stackable_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, gradient_input: Tensor | None = None
) -> Tensor:
    """Return x @ weight.T + bias, in a form that is fast with separate weights per client.

    Args:
        x: Input, float [batch, inputs].
        weight: Weight, float [outputs, inputs].
        bias: Bias, float [outputs], or None.
        gradient_input: Input of the weight's gradient, float [batch, inputs]. If None, x.

    """
    result: Tensor = StackableLinear.apply(x, weight, bias, gradient_input)  # type: ignore[no-untyped-call]
    return result


def client_axis_first(value: Tensor, dim: int | None, size: int) -> Tensor:
    """Return `value` with its client dimension first; a shared value is expanded to all clients."""
    if dim is None:
        return value.expand(size, *value.shape)
    return value if dim == 0 else value.movedim(dim, 0)  # a bare movedim is an op in the trace


# ---- A convolution with separate weights per client
#
# vmap uses one grouped convolution, which is best for tiny images, where launching an operation
# takes longer than running it. For larger images, copying into the grouped layout and back takes
# longer than it saves, so there is one convolution per client, in channels-last layout, in which
# convolution and pooling are fastest on a CPU.

_TINY = 2_000_000
"""Multiplications per client below which the grouped form is faster (measured)."""

Pair = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class ConvGeometry:
    """How the kernel of a convolution moves over an image."""

    stride: Pair = (1, 1)
    """Pixels between two positions of the kernel."""
    padding: Pair = (0, 0)
    """Pixels of zeros on both sides."""
    dilation: Pair = (1, 1)
    """Pixels between two values of the kernel."""
    groups: int = 1
    """Groups of channels, each with separate kernels."""

    @property
    def args(self) -> tuple[Pair, Pair, Pair, int]:
        """The last arguments of F.conv2d."""
        return self.stride, self.padding, self.dilation, self.groups


class _Conv(torch.autograd.Function):
    """What the layer of one client and that of a stack save for their gradients."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors that the gradients need."""
        ctx.save_for_backward(*inputs[:2])
        ctx.geometry = inputs[3]


class StackableConv(_Conv):
    """F.conv2d; under vmap it becomes a `StackedConv`."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry) -> Tensor:
        """Return the output of one client's layer."""
        return F.conv2d(x, weight, bias, *geometry.args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Return the gradients of one client's layer."""
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return (*_backward(grads[0], x, weight, ctx.geometry, needs), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Return the outputs of all clients' layers."""
        (x, weight, bias, geometry), size = inputs, info.batch_size
        x = client_axis_first(x, in_dims[0], size)
        if in_dims[1] is None and in_dims[2] is None:  # one weight for all: one tall batch
            out = F.conv2d(x.flatten(0, 1), weight, bias, *geometry.args)
            return _split(out, size), 0
        weight = client_axis_first(weight, in_dims[1], size)
        bias = bias if bias is None else client_axis_first(bias, in_dims[2], size)
        return _stacked_conv(x, weight, bias, geometry), 0


class StackedConv(_Conv):
    """One convolution per client: x [K, B, C, H, W], weight [K, out, C / groups, h, w]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry) -> Tensor:
        """Apply one grouped convolution, or one per client."""
        if _is_tiny(x, weight, geometry):
            flat = bias if bias is None else bias.flatten()
            args = (flat, *_of_stack(geometry, len(x)).args)
            return _separate(F.conv2d(_side_by_side(x), weight.flatten(0, 1), *args), len(x))
        biases = [None] * len(x) if bias is None else bias.unbind()
        outputs = [
            F.conv2d(channels_last(image), w, b, *geometry.args)
            for image, w, b in zip(x.unbind(), weight.unbind(), biases, strict=True)
        ]
        return _split(torch.cat(outputs), len(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Return the gradients of all clients' layers, each only if it is needed."""
        x, weight = ctx.saved_tensors
        backward = _grouped_backward if _is_tiny(x, weight, ctx.geometry) else _looped_backward
        needs = ctx.needs_input_grad[:3]
        return (*backward(grads[0], x, weight, ctx.geometry, needs), None)


_OptionalTensors = tuple[Tensor | None, Tensor | None, Tensor | None]
_Needs = tuple[bool, ...]


def _grouped_backward(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry, needs: _Needs
) -> _OptionalTensors:
    clients = len(x)
    flat = weight.flatten(0, 1)
    args = (_of_stack(geometry, clients), needs)
    for_x, for_weight, for_bias = _backward(_side_by_side(grad), _side_by_side(x), flat, *args)
    return (
        None if for_x is None else _separate(for_x, clients),
        None if for_weight is None else _split(for_weight, clients),
        None if for_bias is None else _split(for_bias, clients),
    )


def _looped_backward(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry, needs: _Needs
) -> _OptionalTensors:
    clients = zip(grad.unbind(), x.unbind(), weight.unbind(), strict=True)
    grads = [_backward(g, channels_last(i), w, geometry, needs) for g, i, w in clients]
    for_x, for_weight, for_bias = (
        [value for value in column if value is not None] for column in zip(*grads, strict=True)
    )
    return (
        _split(torch.cat(for_x), len(x)) if for_x else None,
        torch.stack(for_weight) if for_weight else None,
        torch.stack(for_bias) if for_bias else None,
    )


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry, needs: _Needs
) -> _OptionalTensors:
    stride, padding, dilation, groups = geometry.args
    sizes = ([len(weight)], stride, padding, dilation, False, [0, 0], groups)
    backward = torch.ops.aten.convolution_backward
    for_x, for_weight, for_bias = backward(grad, x, weight, *sizes, list(needs))
    return (
        for_x if needs[0] else None,
        for_weight if needs[1] else None,
        for_bias if needs[2] else None,
    )


def _of_stack(geometry: ConvGeometry, clients: int) -> ConvGeometry:
    """Return the geometry of all clients' convolutions as one with more groups."""
    return replace(geometry, groups=geometry.groups * clients)


def stackable_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry
) -> Tensor:
    """Return F.conv2d, in a form that is fast with separate weights per client under vmap."""
    result: Tensor = StackableConv.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return result


def _stacked_conv(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry) -> Tensor:
    result: Tensor = StackedConv.apply(x, weight, bias, geometry)  # type: ignore[no-untyped-call]
    return result


def channels_last(x: Tensor) -> Tensor:
    """Return the images [batch, C, H, W] in channels-last memory layout."""
    if x.device.type == "mps":
        return x
    if x.shape[1] == 1:  # the bytes are the same: only the strides differ
        return x.reshape(x.shape[0], *x.shape[2:], 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)


def _is_tiny(x: Tensor, weight: Tensor, geometry: ConvGeometry) -> bool:
    pixels = x.shape[1] * x.shape[3] * x.shape[4] // math.prod(geometry.stride)
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
