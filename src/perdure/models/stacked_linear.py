"""A linear layer whose vectorized form is a few batched matrix products.

vmap turns a linear layer with one weight per client into products of transposed views, and the
weight's gradient gets a layout that slows every later step down. Here the stacked forward pass is
one baddbmm, and each gradient is one contiguous product.

The weight's gradient may use other inputs than the forward pass. With a projection P of the inputs
x, the weight's gradient grad^T (x P) equals (grad^T x) P: the gradient is projected at the price of
projecting one batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

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
    """Return `value` with its client dimension first; a shared value is expanded to all clients.

    Args:
        value: Tensor with a client dimension, or one that all clients share.
        dim: The client dimension. If None, the value is shared.
        size: Number of clients.
    """
    if dim is None:
        return value.expand(size, *value.shape)
    return value if dim == 0 else value.movedim(dim, 0)  # a bare movedim is an op in the trace
