"""Batch normalization over the rows that are not padding, and over all rows, exact to rounding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# ---- Batch normalization over the rows that are not padding, with its gradient written out
#
# Differentiated operation by operation, a traced step would have about a hundred operations per
# layer; with the gradient written out it has about twenty.

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


# ---- Batch normalization over all rows, exact to float rounding in every memory layout
#
# For channels-last images on a CPU, torch's kernel adds up the values of a channel one by one in
# float32. Over the 50 000 values of 64 images of 28x28 pixels the variance is wrong by 1e-5, a
# hundred times the rounding of one number, and units near zero end up on the other side of a ReLU.
# In that case the sums are taken here: of centered values, by tensor operations, which sum
# pairwise.

_FEW = 256
"""Values per channel up to which torch's kernel is as exact; it is faster on small tensors."""

_PlainGradients = tuple[Tensor | None, Tensor, Tensor, None]


class PlainNorm(torch.autograd.Function):
    """Normalizes and scales x [B, C, ...], and returns the mean and variance that it used.

    No gradient flows through the returned statistics.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalized values, mean and biased variance."""
        dims = channel_dims(x)
        mean = x.mean(dims, keepdim=True)
        centered = x - mean
        out = centered.square()
        var = out.mean(dims, keepdim=True)
        scale = torch.rsqrt(var + eps)
        factor = scale * per_channel(weight, x)
        torch.addcmul(per_channel(bias, x), centered, factor, out=out)
        ctx.save_for_backward(centered, scale, factor)
        return _with_statistics(ctx, out, mean, var)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> _PlainGradients:
        """Return the gradients; the input's includes those through mean and variance."""
        centered, scale, factor = ctx.saved_tensors
        grad, dims = grads[0], channel_dims(centered)
        work = grad * centered
        for_bias = grad.sum(dims, keepdim=True)
        for_weight = work.sum(dims, keepdim=True) * scale
        for_x = None
        if ctx.needs_input_grad[0]:
            per_value = factor * (-centered.shape[1] / centered.numel())
            torch.addcmul(for_bias * per_value, centered, for_weight * scale * per_value, out=work)
            for_x = work.addcmul_(grad, factor)
        return for_x, for_weight.flatten(), for_bias.flatten(), None


def _with_statistics(
    ctx: Any, out: Tensor, mean: Tensor, var: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    mean, var = mean.flatten(), var.flatten()
    ctx.mark_non_differentiable(mean, var)
    ctx.set_materialize_grads(False)
    return out, mean, var


def plain_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalized values, and the mean and biased variance of each channel.

    Args:
        x: Values, float [B, C, ...].
        weight: Scale of each channel, float [C].
        bias: Shift of each channel, float [C].
        eps: Added to the variance.

    """
    if _torch_is_exact(x):
        out, mean, scale = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, eps)
        return out, mean.detach(), scale.detach() ** -2 - eps
    normalized: tuple[Tensor, Tensor, Tensor] = PlainNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return normalized


def _torch_is_exact(x: Tensor) -> bool:
    return x.device.type != "cpu" or x.dim() == 2 or x.numel() <= _FEW * x.shape[1]
