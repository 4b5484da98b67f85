"""Gradient alignment: one direction out of several that none of them opposes, as far as possible.

Liu, Liu, Jin, Stone, Liu: Conflict-Averse Gradient Descent (CAGrad), NeurIPS 2021; used by FedOMG
(Nguyen et al., ICLR 2025) and STAMP (eq. 2). Of directions g_1..g_n with mean g-bar,

    GA(g) = g-bar + kappa ||g-bar|| g_Gamma / ||g_Gamma||,      g_Gamma = sum_i Gamma_i g_i,
    Gamma = argmin over the simplex of  g_Gamma . g-bar + kappa ||g-bar|| ||g_Gamma||.

Both lines need nothing but inner products, so everything here works on the Gram matrix G[i, j] =
g_i . g_j, and the answer is one coefficient for each direction. Many problems of one size are
solved at once: a Gram matrix may have leading dimensions (clients, layers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perdure.algebra import simplex
from perdure.core.trees import Tensors

Array = NDArray[np.float64]
Solver = Literal["exact", "published"]
Rescale = Literal["none", "published", "unit"]
Scope = Literal["model", "layer"]
Normalize = Literal["none", "mean", "last"]


@dataclass(frozen=True)
class SearchSettings:
    """The authors' search for Gamma: gradient steps on softmax(w), the best iterate is kept."""

    lr: float = 25.0
    momentum: float = 0.5
    steps: int = 100
    halve_every: int | None = 30


@dataclass(frozen=True)
class Alignment:
    """How directions are aligned.

    kappa: the paper's search radius; 0 gives the mean. normalize: bring every direction to the mean
    norm or to that of the last direction first (F.4.1). rescale: divide the result by 1 + kappa^2
    (the published code), by 1 + kappa (unit: equal directions come out as they went in), or leave
    it as eq. 2 has it. solver: the minimum itself, or what the authors' search finds (`search`).
    scope: one Gamma for the whole model, or one for each of its tensors (the paper's wish for
    future work).
    """

    kappa: float = 0.5
    normalize: Normalize = "mean"
    rescale: Rescale = "published"
    solver: Solver = "exact"
    scope: Scope = "model"
    search: SearchSettings = SearchSettings()

    def coefficients(self, gram: Array) -> Array:
        """The c with GA = sum_i c_i g_i, of Gram matrices [..., n, n].

        A direction that is not finite gets 0 and does not count in the mean. A direction of zeros
        counts in the mean and adds nothing. Where g_Gamma is 0, eq. 2's second term is left out.
        """
        gram = np.asarray(gram, np.float64)
        good = np.isfinite(np.diagonal(gram, axis1=-2, axis2=-1))
        if good.all():
            return self._of_finite(gram)
        flat, keep = gram.reshape(-1, *gram.shape[-2:]), good.reshape(-1, good.shape[-1])
        found = np.zeros(keep.shape)
        for one, mine, row in zip(flat, keep, found, strict=True):
            if mine.any():
                row[mine] = self._of_finite(one[np.ix_(mine, mine)])
        return found.reshape(good.shape)

    def _of_finite(self, gram: Array) -> Array:
        factors = equalizing(gram, self.normalize)
        gram = (gram + np.swapaxes(gram, -1, -2)) / 2  # float32 products are not quite symmetric
        gram = gram * factors[..., :, None] * factors[..., None, :]
        unit = np.diagonal(gram, axis1=-2, axis2=-1).mean(-1)
        unit = np.where(unit > 0, unit, 1.0)
        gram = gram / unit[..., None, None]  # numbers near 1, so that every tolerance is relative
        gamma = self._gamma(gram)
        mean_norm = np.sqrt(np.maximum(gram.mean((-2, -1)), 0))
        aligned = np.sqrt(np.maximum(np.einsum("...i,...ij,...j->...", gamma, gram, gamma), 0))
        there = aligned > _NOTHING
        pull = np.where(there, self.kappa * mean_norm / np.where(there, aligned, 1), 0)
        coefficients = (1 / gram.shape[-1] + gamma * pull[..., None]) * factors
        found: Array = coefficients / self._divisor()
        return found

    def _gamma(self, gram: Array) -> Array:
        if self.kappa == 0 or gram.shape[-1] == 1:
            return np.full(gram.shape[:-1], 1 / gram.shape[-1])
        if self.solver == "exact":
            return exact(gram, self.kappa)
        return published(gram, self.kappa, self.search)

    def _divisor(self) -> float:
        square = {"none": 0.0, "published": self.kappa**2, "unit": self.kappa}
        return 1 + square[self.rescale]


_NOTHING = 1e-7  # of the directions' mean norm: below it g_Gamma is rounding


def exact(gram: Array, kappa: float) -> Array:
    """The Gamma of eq. 2, problem by problem."""
    n = gram.shape[-1]
    found = np.full(gram.shape[:-1], 1 / n)
    mean = found.reshape(-1, n)[0].copy() if found.size else found
    for one, gamma in zip(gram.reshape(-1, n, n), found.reshape(-1, n), strict=True):
        c = kappa * math.sqrt(max(one.mean(), 0.0))
        if c > _NOTHING:  # else the directions cancel out, and eq. 2 gives 0 for every Gamma
            gamma[:] = simplex.solve(one, mean, c)
    return found


def equalizing(gram: Array, normalize: Normalize) -> Array:
    """Factors that bring every direction to one norm; 0 for a direction of zeros."""
    norms = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    if normalize == "none":
        return np.ones_like(norms)
    wanted = norms.mean(-1, keepdims=True) if normalize == "mean" else norms[..., -1:]
    return np.divide(wanted, norms, out=np.zeros_like(norms), where=norms > 0)


def published(gram: Array, kappa: float, search: SearchSettings, epsilon: float = 1e-4) -> Array:
    """Gamma as the authors' code searches it.

    Its epsilons are 1e-4 on a Gram matrix divided by the squared mean norm. The published code also
    adds 1e-4 to the squared norms themselves, which distorts Gamma when norms are below 1e-2; here
    all of it is relative.
    """
    scale = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1)).mean(-1)[..., None, None]
    gram = gram / np.where(scale > 0, scale, 1.0) ** 2
    b = gram.mean(-1)
    c = kappa * np.sqrt(np.maximum(b.mean(-1, keepdims=True), 0) + epsilon)
    logits, speed = np.zeros_like(b), np.zeros_like(b)
    best: Array = np.full_like(b, 1 / b.shape[-1])
    lowest = np.full((*b.shape[:-1], 1), np.inf)
    lr = search.lr
    for step in range(search.steps + 1):
        gamma = _softmax(logits)
        toward = np.einsum("...ij,...j->...i", gram, gamma)
        norm = np.sqrt((toward * gamma).sum(-1, keepdims=True) + epsilon)
        value = (b * gamma).sum(-1, keepdims=True) + c * norm
        best[...] = np.where(value < lowest, gamma, best)
        lowest = np.minimum(value, lowest)
        slope = b + c * toward / norm
        slope = gamma * (slope - (slope * gamma).sum(-1, keepdims=True))
        speed = search.momentum * speed + slope
        logits = logits - lr * speed
        if search.halve_every and (step + 1) % search.halve_every == 0:
            lr /= 2
    return best


def _softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    found: Array = raised / raised.sum(-1, keepdims=True)
    return found


# ---- directions that are whole models


def align(directions: Tensors, alignment: Alignment) -> Tensors:
    """GA of stacked directions: tensors [..., n, d] -> [..., d]."""
    weights = _weights(grams(directions), alignment)
    return {name: _combine(x, weights[place]) for place, (name, x) in enumerate(directions.items())}


def grams(directions: Tensors) -> Array:
    """The Gram matrix of each tensor of stacked directions [..., n, d]: [names, ..., n, n]."""
    return torch.stack([x @ x.mT for x in directions.values()]).double().cpu().numpy()


def align_models(models: Sequence[Tensors], alignment: Alignment) -> Tensors:
    """GA of directions that are models. They are stacked one tensor at a time, never all."""
    weights = _weights(model_grams(models), alignment)
    return {
        name: _combine(_stack(models, name), weights[place]).view(value.shape)
        for place, (name, value) in enumerate(models[0].items())
    }


def model_grams(models: Sequence[Tensors]) -> Array:
    """The Gram matrix of each tensor of several models: [names, n, n]."""
    found = [x @ x.T for x in (_stack(models, name) for name in models[0])]
    return torch.stack(found).double().cpu().numpy()


def _stack(models: Sequence[Tensors], name: str) -> Tensor:
    return torch.stack([model[name].flatten() for model in models])


def _weights(layers: Array, alignment: Alignment) -> Tensor:
    if alignment.scope == "layer":
        return torch.from_numpy(alignment.coefficients(layers))
    found = torch.from_numpy(alignment.coefficients(layers.sum(0)))
    return found.expand(len(layers), *found.shape)


def _combine(x: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(x.device, x.dtype).unsqueeze(-2)
    out = (weights @ x).squeeze(-2)
    if torch.isfinite(out.sum()):
        return out
    # a direction that is not finite has the weight 0, but 0 times infinity is not 0
    return (weights @ x.nan_to_num(0.0, 0.0, 0.0)).squeeze(-2)


# ---- what can be seen of conflicts


def cosines(gram: Array) -> Array:
    """The cosines between all pairs of directions, [..., n (n - 1) / 2]; 0 where one is zero."""
    norms = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    sizes = norms[..., :, None] * norms[..., None, :]
    table = np.divide(gram, sizes, out=np.zeros_like(gram), where=sizes > 0)
    first, second = np.triu_indices(gram.shape[-1], 1)
    pairs: Array = table[..., first, second]
    return pairs
