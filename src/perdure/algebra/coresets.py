"""Few examples that stand for many: which rows to keep so that their mean stays the class's mean.

Herding: Welling, ICML 2009; as iCaRL uses it (Rebuffi et al., CVPR 2017). The literal variant is
eq. 5 of STAMP. MixStyle: Zhou, Yang, Qiao, Xiang, ICLR 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPSILON = 1e-6  # of MixStyle's standard deviation, as its authors have it


def prototype(features: Tensor, stored: Tensor | None = None, before: int = 0) -> Tensor:
    """STAMP's p^l: the class mean over all rows so far, [d].

    features: [N_t, d] of this task's rows; stored: [k, d] of the memory, whose mean stands for the
    `before` rows of earlier tasks. (Eq. 5 prints the sum of counts up to T; it can only be t.)
    """
    if stored is None or len(stored) == 0 or before == 0:
        return features.mean(0)
    count = before + len(features)
    return (before * stored.mean(0) + features.sum(0)) / count


def herding(features: Tensor, target: Tensor, count: int) -> Tensor:
    """Row numbers, best first: each brings the mean of the chosen as near the target as it can."""
    count = min(count, len(features))
    left = torch.zeros(len(features), dtype=features.dtype, device=features.device)
    total, chosen = torch.zeros_like(target), list[int]()
    for size in range(1, count + 1):
        # ||(total + f) / size - target||^2, without what is the same for all rows
        missing = size * target - total
        distance = features.square().sum(1) - 2 * features @ missing + left
        best = int(distance.argmin())
        chosen.append(best)
        left[best] = float("inf")
        total = total + features[best]
    return torch.tensor(chosen, dtype=torch.int64, device=features.device)


def select_by_eq5(
    features: Tensor, target: Tensor, count: int, stored: Tensor | None = None, steps: int = 100
) -> Tensor:
    """Eq. 5 by the letter: minimise ||mean(stored) + (1/N) sum_i a_i f_i - p||^2 over a, take the
    rows with the largest a.

    a starts at 1/N as printed; gradient steps of the size 1/L (the paper names none). With an empty
    memory a = 1 is already a minimum, so which rows are largest depends on start and steps.
    """
    rows = len(features)
    offset = torch.zeros_like(target) if stored is None or len(stored) == 0 else stored.mean(0)
    scaled = features / rows
    curvature = 2 * torch.linalg.matrix_norm(scaled, ord=2).square().clamp(min=1e-12)
    a = features.new_full((rows,), 1 / rows)
    for _ in range(steps):
        a = a - 2 * scaled @ (offset + a @ scaled - target) / curvature
    return a.topk(min(count, rows)).indices


def mixstyle(content: Tensor, style: Tensor, share: Tensor) -> Tensor:
    """Eq. 6: each content image with a mean and deviation between its own and a style image's.

    content, style: [k, channels, height, width], or [k, features] (one channel). share: [k], the
    paper's lambda: 1 leaves the content as it is.
    """
    flat, other = _by_channel(content), _by_channel(style)
    share = share.view(-1, 1, 1)
    mean, deviation = _moments(flat)
    other_mean, other_deviation = _moments(other)
    gamma = share * deviation + (1 - share) * other_deviation
    beta = share * mean + (1 - share) * other_mean
    return (gamma * (flat - mean) / deviation + beta).view(content.shape)


def _by_channel(x: Tensor) -> Tensor:
    return x.flatten(2) if x.dim() > 2 else x.unsqueeze(1)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    variance = x.var(2, unbiased=x.shape[2] > 1, keepdim=True)
    return x.mean(2, keepdim=True), (variance + _EPSILON).sqrt()


def draw_mix_weights(count: int, generator: torch.Generator, alpha: float = 0.1) -> Tensor:
    """Draws of MixStyle's lambda, from Beta(alpha, alpha)."""
    gamma = torch._standard_gamma(torch.full((2, count), alpha), generator=generator)
    total = gamma.sum(0)
    return torch.where(total > 0, gamma[0] / total.clamp(min=1e-30), 0.5)
