"""The loss of a prototypical network, with its gradient written out.

Snell, Swersky, Zemel: Prototypical Networks for Few-shot Learning, NeurIPS 2017. Written for
stacked batches, so that a stack of clients takes as many tensor operations as one client.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def prototypical_loss(features: Tensor, y: Tensor, mask: Tensor | None, classes: int) -> Tensor:
    """Return the mean over rows of d(z, p_y) + log sum_l exp(-d(z, p_l)).

    d is the squared distance divided by the feature size, so that the loss does not become steeper
    with the width; p_l is the mean feature of the batch's rows of class l. A row is left out of its
    class's mean, so that its distance is (n / (n - 1))^2 times that from the mean of all n rows. A
    row that is alone in its class has no p_y and does not count.

    Args:
        features: The features z, float [..., rows, size].
        y: Class of each row, int64 [..., rows].
        mask: 1 for a real row, 0 for padding, float [..., rows]. If None, all rows are real.
        classes: Number of classes.

    Returns:
        The loss, float [...].
    """
    real = torch.ones_like(features[..., 0]) if mask is None else mask
    loss: Tensor = _Prototypical.apply(features, y, real, classes)[0]  # type: ignore[no-untyped-call]
    return loss


@torch.library.custom_op("perdure::prototypical", mutates_args=())
def _with_slope(z: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the loss and its gradient, as one operation, so that a trace records one node.

    Products and sums are fused and done in place where possible: the time of a small model's step
    is proportional to its number of tensor operations.
    """
    if z.dim() == 2:
        loss, slope = _stacked(z.unsqueeze(0), y.unsqueeze(0), mask.unsqueeze(0), classes)
        return loss[0], slope[0]
    return _stacked(z, y, mask, classes)


def _stacked(z: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    member = (y.unsqueeze(-1) == torch.arange(classes, device=y.device)).to(z.dtype)
    real = member * mask.unsqueeze(-1)
    count = real.sum(-2, keepdim=True)
    class_size = torch.bmm(real, count.mT)  # of each row
    averaging = real / count.clamp(min=1)
    means = torch.bmm(averaging.mT, z)
    stretch = (class_size / (class_size - 1).clamp_(min=1)).square_().sub_(1)
    scale = (member * stretch).add_(1).div_(z.shape[-1])
    squares = z.square().sum(-1, keepdim=True) + means.square().sum(-1).unsqueeze(-2)
    logits = torch.baddbmm(squares, z, means.mT, alpha=-2).mul_(scale).neg_()
    log_p = torch.log_softmax(logits.masked_fill_(count == 0, -1e9), -1)
    valid = (class_size > 1).to(z.dtype)
    valid /= valid.sum(-2, keepdim=True).clamp_(min=1)
    weight = valid * member
    loss = (weight * log_p).sum((-2, -1)).neg_()
    # dL / d|z_i - p_l|^2, doubled
    pull = torch.addcmul(weight, log_p.exp_(), valid, value=-1).mul_(scale).mul_(2)
    through = torch.baddbmm(pull.sum(-2).unsqueeze(-1) * means, pull.mT, z, alpha=-1)  # dL / dp
    slope = pull.sum(-1, keepdim=True) * z
    return loss, slope.baddbmm_(pull, means, alpha=-1).baddbmm_(averaging, through)


class _Prototypical(torch.autograd.Function):
    """The loss, with the gradient that was computed together with it."""

    @staticmethod
    def forward(z: Tensor, y: Tensor, mask: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        loss, slope = _with_slope(z, y, mask, classes)
        return loss, slope

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grad[..., None, None] * slope, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *arguments: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Run the same code on the stack."""
        *tensors, classes = arguments
        stacked = [
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(tensors, in_dims, strict=False)
        ]
        out = _Prototypical.apply(*stacked, classes)  # type: ignore[no-untyped-call]
        return out, (0, 0)
