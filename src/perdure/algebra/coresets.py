"""Select few examples that represent many: their mean stays close to the class mean.

Herding: Welling, ICML 2009; as iCaRL uses it (Rebuffi et al., CVPR 2017). `select_by_eq5` is eq. 5
of STAMP. MixStyle: Zhou, Yang, Qiao, Xiang, ICLR 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

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

    Returns:
        The mixed images, in the shape of `content`.
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
