"""Gradient alignment: combine several directions into one that opposes none, as far as possible.

Liu, Liu, Jin, Stone, Liu: Conflict-Averse Gradient Descent (CAGrad), NeurIPS 2021; used by FedOMG
(Nguyen et al., ICLR 2025) and STAMP (eq. 2). For directions g_1..g_n with mean g-bar,

    GA(g) = g-bar + kappa ||g-bar|| g_Gamma / ||g_Gamma||,      g_Gamma = sum_i Gamma_i g_i,
    Gamma = argmin over the simplex of  g_Gamma . g-bar + kappa ||g-bar|| ||g_Gamma||.

Both lines need nothing but inner products, so all functions work on the Gram matrix G[i, j] =
g_i . g_j, and the result is one coefficient per direction. Many problems of one size are solved
together: a Gram matrix may have leading dimensions (clients, layers).
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

from perdure.core.trees import Tensors

# ---- Minimize b . x + c ||x||_G over the simplex, where b = G u for some u: linear plus a norm.
#
# c ||x||_G is the minimum of c / 2 (x G x / tau + tau) over tau > 0, and for a fixed tau the rest
# is a least-squares problem with x >= 0, which an active-set method solves exactly. Its solution
# shows which x_i are positive; on these the minimum has a closed form (`minimize_on_face`). A
# certificate ends the search: for every y in the simplex, b . y + c ||y||_G >= min_i (b + c G x /
# ||x||_G)_i by Cauchy-Schwarz.
#
# In all functions `gram` is G, float64 [n, n], and `b`, `u` and `x` are float64 [n].

Doubles = NDArray[np.float64]

_STEPS = 50
_KINK = 1e-8
"""Norms below this are rounding: squares in a Gram matrix are exact to about 1e-16."""


def gram_norm(gram: Doubles, x: Doubles) -> float:
    """Return ||x||_G = sqrt(x G x)."""
    return math.sqrt(max(float(x @ gram @ x), 0.0))


def objective(gram: Doubles, b: Doubles, c: float, x: Doubles) -> float:
    """Return b . x + c ||x||_G."""
    return float(b @ x) + c * gram_norm(gram, x)


def optimality_gap(gram: Doubles, b: Doubles, c: float, x: Doubles) -> float:
    """Return an upper bound of the difference between the objective at x and its minimum."""
    size = gram_norm(gram, x)
    if size == 0:
        return math.inf
    slope = b + (c / size) * (gram @ x)
    return float(slope @ x - slope.min())


def solve(gram: Doubles, u: Doubles, c: float, tolerance: float = 1e-11) -> Doubles:
    """Return the minimizer for b = G u.

    tau is searched between `low` and `high`: at the minimum it is the norm of x, and the norm of
    the least-squares solution lies above a tau that is too small and below one that is too large.
    """
    b = gram @ u
    if optimality_gap(gram, b, c, u) <= tolerance:  # such as the mean of two equal lengths
        return u
    x_by_faces = walk_faces(gram, b, c, tolerance)
    if x_by_faces is not None:
        return x_by_faces
    root = gram_factor(gram)
    low, high = _KINK, math.sqrt(gram.diagonal().max()) + _KINK
    tau, best, smallest_gap = gram_norm(gram, u), u, math.inf
    for _ in range(_STEPS):
        tau = min(max(tau, low), high)
        x = nearest_point(root, u * (tau / c))
        face = minimize_on_face(gram, b, c, x > 0)
        for y in (x, x if face is None else np.maximum(face, 0) / np.maximum(face, 0).sum()):
            gap = optimality_gap(gram, b, c, y)
            if gap < smallest_gap:
                best, smallest_gap = y, gap
        size = gram_norm(gram, x)
        low, high = (tau, high) if size > tau else (low, tau)
        if smallest_gap <= tolerance or high <= low * (1 + 1e-9):
            break
        tau = size if low < size < high else math.sqrt(low * high)
    return x if high <= 2 * _KINK else best


def walk_faces(gram: Doubles, b: Doubles, c: float, tolerance: float) -> Doubles | None:
    """Return the minimizer, found by dropping negative x_i and adding those that lower the value.

    The search starts from the whole simplex, then from its best corner. Returns None if neither
    start succeeds.
    """
    corner = np.argmin(b + c * np.sqrt(gram.diagonal())) == np.arange(len(b))
    for face in (np.ones(len(b), bool), corner):
        for _ in range(2 * len(b)):
            x = minimize_on_face(gram, b, c, face)
            if x is None:
                break
            if (x < 0).any():
                face = x > 0
                continue
            slope = b + c / max(gram_norm(gram, x), 1e-300) * (gram @ x)
            if slope @ x - slope.min() <= tolerance:
                return x
            if face[slope.argmin()]:
                break
            face = face | (np.arange(len(b)) == slope.argmin())
    return None


def gram_factor(gram: Doubles) -> Doubles:
    """Return R with R^T R = G, also if G is singular."""
    values, vectors = np.linalg.eigh(gram)
    root: Doubles = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    return root


def nearest_point(root: Doubles, shift: Doubles) -> Doubles:
    """Return the x of the simplex with the smallest ||R (x + shift)||.

    On the simplex R (x + shift) = (R + R shift 1^T) x. The least-norm point of a hull is the
    solution of min ||A x||^2 + (sum(x) - 1)^2 over x >= 0, scaled to the sum 1.
    """
    from scipy.optimize import nnls  # imported here because it would slow every command down

    columns = root + (root @ shift)[:, None]
    weighted = np.vstack([columns, np.ones(len(shift))])
    right = np.zeros(len(weighted))
    right[-1] = 1
    x = nnls(weighted, right)[0]
    point: Doubles = x / x.sum()
    return point


def minimize_on_face(
    gram: Doubles, b: Doubles, c: float, face: NDArray[np.bool_]
) -> Doubles | None:
    """Return the minimizer over all x with support in a face (positive or not), or None.

    b + c G x / ||x||_G = l 1 on the face gives x = (||x||_G / c) (l p - q) with G p = 1, G q = b;
    then sum(x) = 1 and ||x||_G = ||x||_G determine l: l^2 A - 2 l B + C = c^2.
    """
    inner = gram[np.ix_(face, face)]
    right = np.stack([np.ones(len(inner)), b[face]], 1)
    try:
        p, q = np.linalg.solve(inner, right).T
    except np.linalg.LinAlgError:
        return None
    a, mixed, square = p.sum(), q.sum(), b[face] @ q
    discriminant = mixed * mixed - a * (square - c * c)
    if not (a > 0 and discriminant > 0):
        return None
    x = np.zeros(len(b))
    x[face] = (mixed + math.sqrt(discriminant)) / a * p - q
    minimizer: Doubles = x / x.sum()
    return minimizer


# ---- Gradient alignment: combine several directions into one that opposes none, as far as possible

Solver = Literal["exact", "published"]
Scale = Literal["paper", "published", "unit"]
"""How long an aligned direction is; see `Alignment.scale`."""
Scope = Literal["model", "layer"]
Normalize = Literal["none", "mean", "last"]

_ZERO_NORM = 1e-7
"""Fraction of the directions' mean norm below which g_Gamma is rounding."""


@dataclass(frozen=True)
class SearchSettings:
    """The authors' search for Gamma: gradient steps on softmax(w), of which the best is taken."""

    lr: float = 25.0
    """Learning rate."""
    momentum: float = 0.5
    """Momentum of the gradient steps."""
    steps: int = 100
    """Number of gradient steps."""
    halve_every: int | None = 30
    """Steps after which the learning rate is halved. If None, it is constant."""


@dataclass(frozen=True)
class Alignment:
    """How directions are aligned."""

    kappa: float = 0.5
    """The paper's search radius; 0 gives the mean."""
    normalize: Normalize = "mean"
    """Scale every direction to the mean norm or to the last direction's norm first (F.4.1)."""
    scale: Scale = "published"
    """`paper`: the result of eq. 2 as printed. `published`: divided by 1 + kappa^2, as in the
    authors' code. `unit`: divided by 1 + kappa, which leaves equal directions unchanged."""
    solver: Solver = "exact"
    """`exact`: the minimum. `published`: the result of the authors' search."""
    scope: Scope = "model"
    """One Gamma for the whole model, or one per tensor (the paper's suggestion for future work)."""
    search: SearchSettings = SearchSettings()
    """Settings of the `published` solver."""

    def coefficients(self, gram: Doubles) -> Doubles:
        """Return the c with GA = sum_i c_i g_i.

        A direction that is not finite gets 0 and is left out of the mean. A direction of zeros
        counts in the mean and adds nothing. If g_Gamma is 0, eq. 2's second term is left out.

        Args:
            gram: Gram matrices of the directions, [..., n, n].

        Returns:
            The coefficients, float64 [..., n].

        """
        gram = np.asarray(gram, np.float64)
        is_finite = np.isfinite(np.diagonal(gram, axis1=-2, axis2=-1))
        if is_finite.all():
            return self._of_finite(gram)
        problems = gram.reshape(-1, *gram.shape[-2:])
        masks = is_finite.reshape(-1, is_finite.shape[-1])
        coefficients = np.zeros(masks.shape)
        for problem, mask, row in zip(problems, masks, coefficients, strict=True):
            if mask.any():
                row[mask] = self._of_finite(problem[np.ix_(mask, mask)])
        return coefficients.reshape(is_finite.shape)

    def _of_finite(self, gram: Doubles) -> Doubles:
        factors = norm_factors(gram, self.normalize)
        gram = (gram + np.swapaxes(gram, -1, -2)) / 2  # float32 products are not quite symmetric
        gram = gram * factors[..., :, None] * factors[..., None, :]
        unit = np.diagonal(gram, axis1=-2, axis2=-1).mean(-1)
        unit = np.where(unit > 0, unit, 1.0)
        gram = gram / unit[..., None, None]  # numbers near 1, so that every tolerance is relative
        gamma = self._gamma(gram)
        mean_norm = np.sqrt(np.maximum(gram.mean((-2, -1)), 0))
        gamma_norm = np.sqrt(np.maximum(np.einsum("...i,...ij,...j->...", gamma, gram, gamma), 0))
        is_nonzero = gamma_norm > _ZERO_NORM
        pull = self.kappa * mean_norm / np.where(is_nonzero, gamma_norm, 1)
        pull = np.where(is_nonzero, pull, 0)
        coefficients = (1 / gram.shape[-1] + gamma * pull[..., None]) * factors
        scaled: Doubles = coefficients / self._divisor()
        return scaled

    def _gamma(self, gram: Doubles) -> Doubles:
        if self.kappa == 0 or gram.shape[-1] == 1:
            return np.full(gram.shape[:-1], 1 / gram.shape[-1])
        if self.solver == "exact":
            return solve_exactly(gram, self.kappa)
        return published_search(gram, self.kappa, self.search)

    def _divisor(self) -> float:
        excess = {"paper": 0.0, "published": self.kappa**2, "unit": self.kappa}
        return 1 + excess[self.scale]


def solve_exactly(gram: Doubles, kappa: float) -> Doubles:
    """Return the Gamma of eq. 2 for Gram matrices [..., n, n]: float64 [..., n]."""
    n = gram.shape[-1]
    gammas = np.full(gram.shape[:-1], 1 / n)
    mean = gammas.reshape(-1, n)[0].copy() if gammas.size else gammas
    for problem, gamma in zip(gram.reshape(-1, n, n), gammas.reshape(-1, n), strict=True):
        c = kappa * math.sqrt(max(problem.mean(), 0.0))
        if c > _ZERO_NORM:  # else the directions cancel out, and eq. 2 gives 0 for every Gamma
            gamma[:] = solve(problem, mean, c)
    return gammas


def norm_factors(gram: Doubles, normalize: Normalize) -> Doubles:
    """Return the factors that scale every direction to one norm; 0 for a direction of zeros."""
    norms = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    if normalize == "none":
        return np.ones_like(norms)
    target = norms.mean(-1, keepdims=True) if normalize == "mean" else norms[..., -1:]
    return np.divide(target, norms, out=np.zeros_like(norms), where=norms > 0)


def published_search(
    gram: Doubles, kappa: float, search: SearchSettings, epsilon: float = 1e-4
) -> Doubles:
    """Return the Gamma that the authors' search finds.

    `epsilon` is relative to the squared mean norm. The published code also adds 1e-4 to the squared
    norms themselves, which distorts Gamma if norms are below 1e-2; here all of it is relative.

    Args:
        gram: Gram matrices of the directions, [..., n, n].
        kappa: Search radius.
        search: Learning rate, momentum and steps.
        epsilon: Added to squared norms before their root is taken.

    Returns:
        The weights Gamma, float64 [..., n].

    """
    scale = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1)).mean(-1)[..., None, None]
    gram = gram / np.where(scale > 0, scale, 1.0) ** 2
    b = gram.mean(-1)
    c = kappa * np.sqrt(np.maximum(b.mean(-1, keepdims=True), 0) + epsilon)
    logits, velocity = np.zeros_like(b), np.zeros_like(b)
    best: Doubles = np.full_like(b, 1 / b.shape[-1])
    lowest = np.full((*b.shape[:-1], 1), np.inf)
    lr = search.lr
    for step in range(search.steps + 1):
        gamma = _softmax(logits)
        products = np.einsum("...ij,...j->...i", gram, gamma)
        norm = np.sqrt((products * gamma).sum(-1, keepdims=True) + epsilon)
        value = (b * gamma).sum(-1, keepdims=True) + c * norm
        best[...] = np.where(value < lowest, gamma, best)
        lowest = np.minimum(value, lowest)
        slope = b + c * products / norm
        slope = gamma * (slope - (slope * gamma).sum(-1, keepdims=True))
        velocity = search.momentum * velocity + slope
        logits = logits - lr * velocity
        if search.halve_every and (step + 1) % search.halve_every == 0:
            lr /= 2
    return best


def _softmax(logits: Doubles) -> Doubles:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: Doubles = powers / powers.sum(-1, keepdims=True)
    return probabilities


# ---- directions that are whole models


def align(directions: Tensors, alignment: Alignment) -> Tensors:
    """Return GA of stacked directions.

    Args:
        directions: Per parameter, n directions of d values: float [..., n, d].
        alignment: How to align.

    Returns:
        Per parameter, the aligned direction: float [..., d].

    """
    weights = _weights(gram_matrices(directions), alignment)
    return {name: _combine(x, weights[i]) for i, (name, x) in enumerate(directions.items())}


def gram_matrices(directions: Tensors) -> Doubles:
    """Return the Gram matrices of stacked directions, [..., n, d] each: [names, ..., n, n]."""
    return torch.stack([x @ x.mT for x in directions.values()]).double().cpu().numpy()


def align_models(models: Sequence[Tensors], alignment: Alignment) -> Tensors:
    """Return GA of directions that are models, stacking only one tensor at a time."""
    weights = _weights(model_gram_matrices(models), alignment)
    return {
        name: _combine(_stack(models, name), weights[i]).view(value.shape)
        for i, (name, value) in enumerate(models[0].items())
    }


def model_gram_matrices(models: Sequence[Tensors]) -> Doubles:
    """Return the Gram matrix of each tensor of n models: [names, n, n]."""
    grams = [x @ x.T for x in (_stack(models, name) for name in models[0])]
    return torch.stack(grams).double().cpu().numpy()


def _stack(models: Sequence[Tensors], name: str) -> Tensor:
    return torch.stack([model[name].flatten() for model in models])


def _weights(grams: Doubles, alignment: Alignment) -> Tensor:
    if alignment.scope == "layer":
        return torch.from_numpy(alignment.coefficients(grams))
    shared = torch.from_numpy(alignment.coefficients(grams.sum(0)))
    return shared.expand(len(grams), *shared.shape)


def _combine(x: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(x.device, x.dtype).unsqueeze(-2)
    combined = (weights @ x).squeeze(-2)
    if torch.isfinite(combined.sum()):
        return combined
    # a direction that is not finite has the weight 0, but 0 times infinity is not 0
    return (weights @ x.nan_to_num(0.0, 0.0, 0.0)).squeeze(-2)


# ---- diagnostics of conflicts


def cosines(gram: Doubles) -> Doubles:
    """Return the cosines between all pairs of directions; 0 if one of the two is zero.

    Args:
        gram: Gram matrices of the directions, [..., n, n].

    Returns:
        The cosines, float64 [..., n (n - 1) / 2].

    """
    norms = np.sqrt(np.diagonal(gram, axis1=-2, axis2=-1))
    products = norms[..., :, None] * norms[..., None, :]
    table = np.divide(gram, products, out=np.zeros_like(gram), where=products > 0)
    first, second = np.triu_indices(gram.shape[-1], 1)
    pairs: Doubles = table[..., first, second]
    return pairs
