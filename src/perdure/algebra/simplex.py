"""Minimize b . x + c ||x||_G over the simplex, where b = G u for some u: linear plus a norm.

c ||x||_G is the minimum of c / 2 (x G x / tau + tau) over tau > 0, and for a fixed tau the rest is
a least-squares problem with x >= 0, which an active-set method solves exactly. Its solution shows
which x_i are positive; on these the minimum has a closed form (`minimize_on_face`). A certificate
ends the search: for every y in the simplex, b . y + c ||y||_G >= min_i (b + c G x / ||x||_G)_i by
Cauchy-Schwarz.

In all functions `gram` is G, float64 [n, n], and `b`, `u` and `x` are float64 [n].
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_STEPS = 50
_KINK = 1e-8
"""Norms below this are rounding: squares in a Gram matrix are exact to about 1e-16."""


def gram_norm(gram: Array, x: Array) -> float:
    """Return ||x||_G = sqrt(x G x)."""
    return math.sqrt(max(float(x @ gram @ x), 0.0))


def objective(gram: Array, b: Array, c: float, x: Array) -> float:
    """Return b . x + c ||x||_G."""
    return float(b @ x) + c * gram_norm(gram, x)


def optimality_gap(gram: Array, b: Array, c: float, x: Array) -> float:
    """Return an upper bound of the difference between the objective at x and its minimum."""
    size = gram_norm(gram, x)
    if size == 0:
        return math.inf
    slope = b + (c / size) * (gram @ x)
    return float(slope @ x - slope.min())


def solve(gram: Array, u: Array, c: float, tolerance: float = 1e-11) -> Array:
    """Return the minimizer for b = G u.

    tau is searched between `low` and `high`: at the minimum it is the norm of x, and the norm of
    the least-squares solution lies above a tau that is too small and below one that is too large.

    Args:
        gram: The matrix G, with entries of order 1.
        u: A point of the simplex.
        c: Weight of the norm.
        tolerance: Largest difference from the minimum.
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


def walk_faces(gram: Array, b: Array, c: float, tolerance: float) -> Array | None:
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


def gram_factor(gram: Array) -> Array:
    """Return R with R^T R = G, also if G is singular."""
    values, vectors = np.linalg.eigh(gram)
    root: Array = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    return root


def nearest_point(root: Array, shift: Array) -> Array:
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
    point: Array = x / x.sum()
    return point


def minimize_on_face(gram: Array, b: Array, c: float, face: NDArray[np.bool_]) -> Array | None:
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
    minimizer: Array = x / x.sum()
    return minimizer
