"""Batch normalization over the rows that are not padding, with its gradient written out.

Differentiated operation by operation, a traced step would have about a hundred operations per
layer; with the gradient written out it has about twenty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None, None]


class MaskedNorm(torch.autograd.Function):
    """Normalizes and scales x [B, C, ...], and returns the mean and variance that it used.

    `row_weights` [B, 1, ...] is the weight of each value in the statistics of its channel: one over
    the number of real values, or 0 for padding. No gradient flows through the returned statistics.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, row_weights: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return output, mean, variance and, for the gradient, standardized values and scale."""
        dims = channel_dims(x)
        mean = (x * row_weights).sum(dims, keepdim=True)
        centered = x - mean
        var = (centered.square() * row_weights).sum(dims, keepdim=True)
        scale = torch.rsqrt(var + eps)
        standard = centered * scale
        out = standard * per_channel(weight, x) + per_channel(bias, x)
        return out, mean.flatten(), var.flatten(), standard, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the tensors that the gradients need."""
        _, weight, _, row_weights, _ = inputs
        ctx.save_for_backward(output[3], output[4], weight, row_weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """Return the gradients; the input's includes those through mean and variance."""
        standard, scale, weight, row_weights = ctx.saved_tensors
        grad, dims = grads[0], channel_dims(standard)
        for_bias = grad.sum(dims, keepdim=True)
        for_weight = (grad * standard).sum(dims, keepdim=True)
        for_x = None
        if ctx.needs_input_grad[0]:
            through_statistics = (for_bias + standard * for_weight) * row_weights
            for_x = (grad - through_statistics) * (scale * per_channel(weight, standard))
        return for_x, for_weight.flatten(), for_bias.flatten(), None, None


def masked_norm(
    x: Tensor, weight: Tensor, bias: Tensor, row_weights: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalized values, and the mean and biased variance of each channel.

    Args:
        x: Values, float [B, C, ...].
        weight: Scale of each channel, float [C].
        bias: Shift of each channel, float [C].
        row_weights: Weight of each row in the statistics, float [B, 1, ...]; 0 for padding.
        eps: Added to the variance.
    """
    out, mean, var, _, _ = MaskedNorm.apply(x, weight, bias, row_weights, eps)  # type: ignore[no-untyped-call]
    return out, mean.detach(), var.detach()


def channel_dims(x: Tensor) -> list[int]:
    """Return the dimensions that a channel's statistics are taken over: all but the second."""
    return [0, *range(2, x.dim())]


def per_channel(value: Tensor, like: Tensor) -> Tensor:
    """Return one value per channel, [C], in a shape that broadcasts against `like` [B, C, ...]."""
    return value.reshape(-1, *[1] * (like.dim() - 2))
