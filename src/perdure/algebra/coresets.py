"""Few examples that represent many, and the loss of a network of prototypes on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# ---- Select few examples that represent many: their mean stays close to the class mean
#
# Herding: Welling, ICML 2009; as iCaRL uses it (Rebuffi et al., CVPR 2017). `select_by_eq5` is eq.
# 5 of STAMP. MixStyle: Zhou, Yang, Qiao, Xiang, ICLR 2021.

_EPSILON = 1e-6
"""Added to MixStyle's variances, as its authors do."""
_ROUNDING = 1e-4
"""Relative difference of two squared distances that rounding in float32 may explain."""


def prototype(features: Tensor, stored: Tensor | None = None, before: int = 0) -> Tensor:
    """Return STAMP's p^l: the mean over all examples of a class so far.

    Eq. 5 prints the sum of counts up to T; it can only be t.

    Args:
        features: Features of this task's examples, float [N_t, d].
        stored: Features of the stored examples, float [k, d]; their mean represents earlier tasks.
        before: Number of examples in earlier tasks.

    Returns:
        The prototype, float [d].

    """
    if stored is None or len(stored) == 0 or before == 0:
        return features.mean(0)
    count = before + len(features)
    return (before * stored.mean(0) + features.sum(0)) / count


def herding(features: Tensor, target: Tensor, count: int) -> Tensor:
    """Select rows greedily: each brings the mean of the selection as close to the target as it can.

    Args:
        features: Candidates, float [N, d].
        target: Mean to approximate, float [d].
        count: Number of rows to select, at most N of them.

    Returns:
        Indices of the selected rows, best first, int64 [min(count, N)].

    """
    count = min(count, len(features))
    penalty = torch.zeros(len(features), dtype=features.dtype, device=features.device)
    total, chosen = torch.zeros_like(target), list[int]()
    for size in range(1, count + 1):
        # ||(total + f) / size - target||^2, without the terms that are the same for all rows
        missing = size * target - total
        distance = features.square().sum(1) - 2 * features @ missing + penalty
        best = int(distance.argmin())
        chosen.append(best)
        penalty[best] = float("inf")
        total = total + features[best]
    return torch.tensor(chosen, dtype=torch.int64, device=features.device)


def select_matching(
    features: Tensor, target: Tensor, count: int, generator: torch.Generator, draws: int = 100
) -> Tensor:
    """Select the one of several random sets of rows whose mean is nearest to the target.

    Unlike herding it does not prefer typical rows: losses and gradients of the set are those of a
    random one, with a mean that is as near as herding's first few rows. Of sets that are equally
    near but for rounding, as both halves of a class are, the first is selected.

    Args:
        features: Candidates, float [N, d].
        target: Mean to approximate, float [d].
        count: Number of rows to select, at most N of them.
        generator: Draws the sets.
        draws: Number of sets.

    Returns:
        Indices of the selected rows in random order, int64 [min(count, N)].

    """
    keys = torch.rand(draws, len(features), generator=generator).to(features.device)
    sets = keys.argsort(1)[:, :count]
    distances = (features[sets].mean(1) - target).square().sum(1)
    is_nearest = distances <= (1 + _ROUNDING) * distances.min()
    return sets[is_nearest.int().argmax()]


def select_by_eq5(
    features: Tensor, target: Tensor, count: int, stored: Tensor | None = None, steps: int = 100
) -> Tensor:
    """Select rows by eq. 5 as printed.

    Minimize ||mean(stored) + (1/N) sum_i a_i f_i - p||^2 over a, and take the rows with the largest
    a. All a start at 1/N as printed; the gradient steps have the size 1/L (the paper names none).
    With an empty memory a = 1 is already a minimum, so the result depends on start and steps.

    Args:
        features: Candidates f, float [N, d].
        target: Prototype p, float [d].
        count: Number of rows to select, at most N of them.
        stored: Features of the stored examples, float [k, d].
        steps: Number of gradient steps.

    Returns:
        Indices of the selected rows, int64 [min(count, N)].

    """
    rows = len(features)
    offset = torch.zeros_like(target) if stored is None or len(stored) == 0 else stored.mean(0)
    scaled = features / rows
    curvature = 2 * torch.linalg.matrix_norm(scaled, ord=2).square().clamp(min=1e-12)
    a = features.new_full((rows,), 1 / rows)
    for _ in range(steps):
        a = a - 2 * scaled @ (offset + a @ scaled - target) / curvature
    return a.topk(min(count, rows)).indices


def mixstyle(content: Tensor, style: Tensor, content_weight: Tensor) -> Tensor:
    """Return the content images with a mean and deviation between theirs and the style's (eq. 6).

    Args:
        content: Images, float [k, channels, height, width], or rows [k, features] (one channel).
        style: Images of the same shape.
        content_weight: The paper's lambda, float [k]; 1 leaves the content unchanged.

    """
    flat, style_flat = _by_channel(content), _by_channel(style)
    weight = content_weight.view(-1, 1, 1)
    mean, deviation = _moments(flat)
    style_mean, style_deviation = _moments(style_flat)
    gamma = weight * deviation + (1 - weight) * style_deviation
    beta = weight * mean + (1 - weight) * style_mean
    return (gamma * (flat - mean) / deviation + beta).view(content.shape)


def _by_channel(x: Tensor) -> Tensor:
    return x.flatten(2) if x.dim() > 2 else x.unsqueeze(1)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    variance = x.var(2, unbiased=x.shape[2] > 1, keepdim=True)
    return x.mean(2, keepdim=True), (variance + _EPSILON).sqrt()


def draw_mix_weights(count: int, generator: torch.Generator, alpha: float = 0.1) -> Tensor:
    """Draw MixStyle's lambda from Beta(alpha, alpha): float [count]."""
    gamma = torch._standard_gamma(torch.full((2, count), alpha), generator=generator)
    total = gamma.sum(0)
    return torch.where(total > 0, gamma[0] / total.clamp(min=1e-30), 0.5)


# ---- The loss of a prototypical network, with its gradient written out
#
# Snell, Swersky, Zemel: Prototypical Networks for Few-shot Learning, NeurIPS 2017. Written for
# stacked batches, so that a stack of clients takes as many tensor operations as one client.


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
