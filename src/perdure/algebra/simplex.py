"""Minimise b . x + c ||x||_G over the simplex, where b = G u for some u: linear plus a norm.

c ||x||_G is the least c / 2 (x G x / tau + tau) over tau > 0, and for a fixed tau what is left is a
least-squares problem with x >= 0, which an active-set method solves exactly. It tells which x_i
are positive; on these the minimum has a closed form (below). A certificate ends the search: for
every y in the simplex, b . y + c ||y||_G >= min_i (b + c G x / ||x||_G)_i by Cauchy-Schwarz.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_STEPS = 50
_KINK = 1e-8
"""Norms below this are rounding: a Gram matrix knows squares to about 1e-16."""


def norm(gram: Array, x: Array) -> float:
    """||x||_G = sqrt(x G x)."""
    return math.sqrt(max(float(x @ gram @ x), 0.0))


def objective(gram: Array, b: Array, c: float, x: Array) -> float:
    """What is minimised."""
    return float(b @ x) + c * norm(gram, x)


def gap(gram: Array, b: Array, c: float, x: Array) -> float:
    """How far x can be from the minimum at most."""
    size = norm(gram, x)
    if size == 0:
        return math.inf
    slope = b + (c / size) * (gram @ x)
    return float(slope @ x - slope.min())


def solve(gram: Array, u: Array, c: float, tolerance: float = 1e-11) -> Array:
    """The minimiser for b = G u, within `tolerance` of the minimum; numbers are of order 1.

    tau is searched between `low` and `high`: at the minimum it is the norm of x, and the norm that
    least squares finds lies above a tau that is too small and below one that is too large.
    """
    b = gram @ u
    if gap(gram, b, c, u) <= tolerance:  # always so for the mean of two directions of one length
        return u
    quick = walk_faces(gram, b, c, tolerance)
    if quick is not None:
        return quick
    root = factor(gram)
    low, high = _KINK, math.sqrt(gram.diagonal().max()) + _KINK
    tau, best, least = norm(gram, u), u, math.inf
    for _ in range(_STEPS):
        tau = min(max(tau, low), high)
        x = nearest(root, u * (tau / c))
        face = on_face(gram, b, c, x > 0)
        for y in (x, x if face is None else np.maximum(face, 0) / np.maximum(face, 0).sum()):
            found = gap(gram, b, c, y)
            if found < least:
                best, least = y, found
        size = norm(gram, x)
        low, high = (tau, high) if size > tau else (low, tau)
        if least <= tolerance or high <= low * (1 + 1e-9):
            break
        tau = size if low < size < high else math.sqrt(low * high)
    return x if high <= 2 * _KINK else best


def walk_faces(gram: Array, b: Array, c: float, tolerance: float) -> Array | None:
    """The minimiser by leaving out what is negative and taking in what lowers the objective.

    From all of the simplex, then from its best corner. None where this does not end well.
    """
    corner = np.argmin(b + c * np.sqrt(gram.diagonal())) == np.arange(len(b))
    for face in (np.ones(len(b), bool), corner):
        for _ in range(2 * len(b)):
            x = on_face(gram, b, c, face)
            if x is None:
                break
            if (x < 0).any():
                face = x > 0
                continue
            slope = b + c / max(norm(gram, x), 1e-300) * (gram @ x)
            if slope @ x - slope.min() <= tolerance:
                return x
            if face[slope.argmin()]:
                break
            face = face | (np.arange(len(b)) == slope.argmin())
    return None


def factor(gram: Array) -> Array:
    """R with R^T R = G, also where G is singular."""
    values, vectors = np.linalg.eigh(gram)
    found: Array = np.sqrt(np.maximum(values, 0))[:, None] * vectors.T
    return found


def nearest(root: Array, shift: Array) -> Array:
    """The x of the simplex with the least ||R (x + shift)||.

    On the simplex R (x + shift) = (R + R shift 1^T) x. The least-norm point of a hull is the
    solution of min ||A x||^2 + (sum(x) - 1)^2 over x >= 0, brought to the sum 1.
    """
    from scipy.optimize import nnls  # not at the top: every command would pay for it

    columns = root + (root @ shift)[:, None]
    weighted = np.vstack([columns, np.ones(len(shift))])
    right = np.zeros(len(weighted))
    right[-1] = 1
    x = nnls(weighted, right)[0]
    found: Array = x / x.sum()
    return found


def on_face(gram: Array, b: Array, c: float, face: NDArray[np.bool_]) -> Array | None:
    """The minimiser over all x with support in a face (positive or not), where there is one.

    b + c G x / ||x||_G = l 1 on the face gives x = (||x||_G / c) (l p - q) with G p = 1, G q = b;
    then sum(x) = 1 and ||x||_G = ||x||_G settle l: l^2 A - 2 l B + C = c^2.
    """
    inner = gram[np.ix_(face, face)]
    right = np.stack([np.ones(len(inner)), b[face]], 1)
    try:
        p, q = np.linalg.solve(inner, right).T
    except np.linalg.LinAlgError:
        return None
    a, mixed, square = p.sum(), q.sum(), b[face] @ q
    under = mixed * mixed - a * (square - c * c)
    if not (a > 0 and under > 0):
        return None
    x = np.zeros(len(b))
    x[face] = (mixed + math.sqrt(under)) / a * p - q
    found: Array = x / x.sum()
    return found
