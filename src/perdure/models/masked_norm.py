"""Batch normalisation over the rows that count, with its gradient written out.

Differentiated operation by operation it would be some hundred operations a layer in a traced
step; like this it is about twenty.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, None, None]


class MaskedNorm(torch.autograd.Function):
    """x [B, C, ...] to its normalised and scaled values, with the mean and variance used.

    `share` [B, 1, ...] is the weight of each value in the statistics of its channel: one over
    the number of values that count, or 0 for padding. No gradient flows through the statistics
    that are returned.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor, share: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Normalised values, mean, variance; and, for the gradient, centred values and scale."""
        dims = channel_dims(x)
        mean = (x * share).sum(dims, keepdim=True)
        centred = x - mean
        var = (centred.square() * share).sum(dims, keepdim=True)
        scale = torch.rsqrt(var + eps)
        standard = centred * scale
        out = standard * per_channel(weight, x) + per_channel(bias, x)
        return out, mean.flatten(), var.flatten(), standard, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the gradients are made of."""
        _, weight, _, share, _ = inputs
        ctx.save_for_backward(output[3], output[4], weight, share)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _Gradients:
        """The gradients, of which the input's also goes through mean and variance."""
        standard, scale, weight, share = ctx.saved_tensors
        grad, dims = grads[0], channel_dims(standard)
        for_bias = grad.sum(dims, keepdim=True)
        for_weight = (grad * standard).sum(dims, keepdim=True)
        for_x = None
        if ctx.needs_input_grad[0]:
            through_statistics = (for_bias + standard * for_weight) * share
            for_x = (grad - through_statistics) * (scale * per_channel(weight, standard))
        return for_x, for_weight.flatten(), for_bias.flatten(), None, None


def masked_norm(
    x: Tensor, weight: Tensor, bias: Tensor, share: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised values, and the mean and biased variance of each channel."""
    found = MaskedNorm.apply(x, weight, bias, share, eps)  # type: ignore[no-untyped-call]
    return found[0], found[1].detach(), found[2].detach()


def channel_dims(x: Tensor) -> list[int]:
    """The dimensions over which a channel's statistics go: all but the second."""
    return [0, *range(2, x.dim())]


def per_channel(value: Tensor, like: Tensor) -> Tensor:
    """One value a channel, shaped to go with x."""
    return value.reshape(-1, *[1] * (like.dim() - 2))
