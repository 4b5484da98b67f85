"""A linear layer whose vectorised form is a handful of batched matrix products.

Left to itself, vmap turns a linear layer with one weight per client into products of transposed
views, and the weight's gradient comes out in a layout that every later step pays for. Here the
stacked forward pass is one baddbmm, and each gradient is one product that is contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class LiftedLinear(torch.autograd.Function):
    """x @ weight.T + bias for x of two dimensions; under vmap it becomes a StackedLinear."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One client's layer."""
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients are made of."""
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Gradients of one client's layer, each only if asked for."""
        x, weight = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0]
        return (
            grad @ weight if needs[0] else None,
            grad.t() @ x if needs[1] else None,
            grad.sum(0) if needs[2] else None,
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        """All clients' layers at once."""
        x = front(x, in_dims[0], info.batch_size)
        if in_dims[1] is None and in_dims[2] is None:  # one weight for all: one tall product
            return F.linear(x, weight, bias), 0
        weight = front(weight, in_dims[1], info.batch_size)
        if bias is not None:
            bias = front(bias, in_dims[2], info.batch_size)
        return stacked_linear(x, weight, bias), 0


class StackedLinear(torch.autograd.Function):
    """A linear layer for each client: x [K, B, in], weight [K, out, in], bias [K, out]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One batched product for all clients."""
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias[:, None], x, turned)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients are made of."""
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Gradients of all clients' layers, each only if asked for."""
        x, weight = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0]
        return (
            torch.bmm(grad, weight) if needs[0] else None,
            torch.bmm(grad.transpose(1, 2), x) if needs[1] else None,
            grad.sum(1) if needs[2] else None,
        )


def lifted_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """LiftedLinear as a typed function."""
    result: Tensor = LiftedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def stacked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """StackedLinear as a typed function."""
    result: Tensor = StackedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def front(value: Tensor, dim: int | None, size: int) -> Tensor:
    """The client dimension first; a value that all clients share is viewed once for each."""
    if dim is None:
        return value.expand(size, *value.shape)
    return value if dim == 0 else value.movedim(dim, 0)  # a bare movedim is an op in the trace
