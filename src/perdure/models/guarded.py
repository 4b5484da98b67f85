"""A linear layer whose weight sees other inputs in its gradient than in the forward pass.

With inputs x projected away from a space, the weight's gradient grad^T (x P) equals (grad^T x) P: a
projection of the gradient at the price of projecting one batch. See stacked.py on the stacked form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.models.stacked import front

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None]


class GuardedLinear(torch.autograd.Function):
    """x @ weight.T + bias; `seen` stands for x in the weight's gradient."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, seen: Tensor) -> Tensor:
        """One client's layer."""
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients are made of."""
        _, weight, _, seen = inputs
        ctx.save_for_backward(weight, seen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Gradients of one client's layer, each only if asked for."""
        weight, seen = ctx.saved_tensors
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
        seen: Tensor,
    ) -> tuple[Tensor, int]:
        """All clients' layers at once."""
        x, weight, seen = (
            front(value, dim, info.batch_size)
            for value, dim in ((x, in_dims[0]), (weight, in_dims[1]), (seen, in_dims[3]))
        )
        if bias is not None:
            bias = front(bias, in_dims[2], info.batch_size)
        result: Tensor = StackedGuarded.apply(x, weight, bias, seen)  # type: ignore[no-untyped-call]
        return result, 0


class StackedGuarded(torch.autograd.Function):
    """A guarded layer a client: x and seen [K, B, in], weight [K, out, in], bias [K, out]."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, seen: Tensor) -> Tensor:
        """One batched product for all clients."""
        turned = weight.transpose(1, 2)
        return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias[:, None], x, turned)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep what the gradients are made of."""
        _, weight, _, seen = inputs
        ctx.save_for_backward(weight, seen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Gradients of all clients' layers, each only if asked for."""
        weight, seen = ctx.saved_tensors
        needs, grad = ctx.needs_input_grad, grads[0]
        return (
            torch.bmm(grad, weight) if needs[0] else None,
            torch.bmm(grad.transpose(1, 2), seen) if needs[1] else None,
            grad.sum(1) if needs[2] else None,
            None,
        )


def guarded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, seen: Tensor) -> Tensor:
    """GuardedLinear as a typed function, for x of two dimensions."""
    result: Tensor = GuardedLinear.apply(x, weight, bias, seen)  # type: ignore[no-untyped-call]
    return result
