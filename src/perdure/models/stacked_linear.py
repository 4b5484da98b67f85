"""A linear layer whose vectorised form is a handful of batched matrix products.

Left to itself, vmap turns a linear layer with one weight per client into products of transposed
views, and the weight's gradient comes out in a layout that every later step pays for. Here the
stacked forward pass is one baddbmm, and each gradient is one product that is contiguous.

The weight may see other inputs in its gradient than in the forward pass. With inputs x projected
away from a space, the weight's gradient grad^T (x P) equals (grad^T x) P: a projection of the
gradient at the price of projecting one batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None]


class StackableLinear(torch.autograd.Function):
    """x @ weight.T + bias for x of two dimensions; under vmap it becomes a StackedLinear.

    seen: stands for x in the weight's gradient; None: x itself.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, seen: Tensor | None) -> Tensor:
        """One client's layer."""
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients are made of."""
        _keep_for_gradients(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Gradients of one client's layer, each only if asked for."""
        seen, weight = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0]
        return (
            grad @ weight if needs[0] else None,
            grad.t() @ seen if needs[1] else None,
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
        seen: Tensor | None,
    ) -> tuple[Tensor, int]:
        """All clients' layers at once."""
        x = client_axis_first(x, in_dims[0], info.batch_size)
        if in_dims[1] is None and in_dims[2] is None and seen is None:
            return F.linear(x, weight, bias), 0  # one weight for all: one tall product
        weight = client_axis_first(weight, in_dims[1], info.batch_size)
        bias, seen = (
            None if value is None else client_axis_first(value, dim, info.batch_size)
            for value, dim in zip((bias, seen), in_dims[2:], strict=True)
        )
        result: Tensor = StackedLinear.apply(x, weight, bias, seen)  # type: ignore[no-untyped-call]
        return result, 0


class StackedLinear(torch.autograd.Function):
    """A linear layer for each client: x and seen [K, B, in], weight [K, out, in], bias [K, out]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, seen: Tensor | None) -> Tensor:
        """One batched product for all clients."""
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias[:, None], x, turned)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients are made of."""
        _keep_for_gradients(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Gradients of all clients' layers, each only if asked for."""
        seen, weight = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0]
        return (
            torch.bmm(grad, weight) if needs[0] else None,
            torch.bmm(grad.transpose(1, 2), seen) if needs[1] else None,
            grad.sum(1) if needs[2] else None,
            None,
        )


def _keep_for_gradients(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, weight, _, seen = inputs
    ctx.save_for_backward(x if seen is None else seen, weight)


def stackable_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, seen: Tensor | None = None
) -> Tensor:
    """LiftedLinear as a typed function."""
    result: Tensor = StackableLinear.apply(x, weight, bias, seen)  # type: ignore[no-untyped-call]
    return result


def client_axis_first(value: Tensor, dim: int | None, size: int) -> Tensor:
    """The client dimension first; a value that all clients share is viewed once for each."""
    if dim is None:
        return value.expand(size, *value.shape)
    return value if dim == 0 else value.movedim(dim, 0)  # a bare movedim is an op in the trace
