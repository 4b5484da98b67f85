"""Subspaces of a layer's inputs by orthonormal bases, and rules for how many directions stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.core.trees import Tensors

# ---- Subspaces of a layer's inputs by orthonormal bases, and projections of matrices onto them.
#
# A weight W is out x in, inputs are columns of length d = in, and a basis O is d x r with
# orthonormal columns. An update D of W leaves the outputs for all inputs in span(O) unchanged
# exactly if D O = 0.

TOLERANCE = 1e-6
"""Directions shorter than this fraction of the longest one are rounding."""


def project_out_columns(columns: Tensor, basis: Tensor) -> Tensor:
    """Return X - O O^T X: the columns of X without their component in span(O)."""
    return columns - basis @ (basis.T @ columns)


def complement(basis: Tensor) -> Tensor:
    """Return an orthonormal basis of the orthogonal complement of span(O): d x (d - r)."""
    full: Tensor = torch.linalg.qr(basis.double(), mode="complete")[0]
    return full[:, basis.shape[1] :].to(basis.dtype).contiguous()


def new_directions(
    candidates: Tensor, project_out: Callable[[Tensor], Tensor] = lambda columns: columns
) -> Tensor:
    """Return an orthonormal basis of the directions that candidates add to a known subspace.

    Dependent candidates add nothing; a plain QR would invent directions for them. The span of the
    result does not depend on the order of the candidates.

    Args:
        candidates: Columns, float [d, n].
        project_out: Removes the component in the known subspace from columns. It is applied twice,
            because the first time leaves rounding errors of the size of the removed component.

    Returns:
        The new directions, float [d, at most n].

    """
    columns = candidates.double()
    if columns.shape[1] == 0:
        return candidates
    scale = torch.linalg.matrix_norm(columns, ord=2)
    left, lengths, _ = torch.linalg.svd(project_out(project_out(columns)), full_matrices=False)
    new: Tensor = left[:, lengths > TOLERANCE * scale].to(candidates.dtype)
    return new


def principal_directions(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return left singular vectors (as columns) and singular values, largest first, at most d each.

    For a wide matrix these are computed from the eigenvectors of X X^T in double precision, which
    is much faster and exact for singular values above 1e-8 of the largest.
    """
    columns = matrix.double()
    if columns.shape[1] <= columns.shape[0]:
        left, values, _ = torch.linalg.svd(columns, full_matrices=False)
        return left, values
    squares, vectors = torch.linalg.eigh(columns @ columns.T)
    return vectors.flip(1), squares.flip(0).clamp(min=0).sqrt()


def extend_basis(basis: Tensor, candidates: Tensor) -> Tensor:
    """Return [O, new], an orthonormal basis of span(O) + span(candidates) of at most d columns."""
    known = basis.double()
    return torch.cat(
        [basis, new_directions(candidates, lambda x: project_out_columns(x, known))], dim=1
    )


def projector(tree: Tensors) -> Tensors:
    """Return a subspace's tree in the form in which many projections are fastest.

    That is the projector I - O O^T if the rank is between a quarter and three quarters of d: one
    product then takes no more operations than two thin ones, and its rounding is still far below
    the remainder of a matrix. Otherwise it is the tree itself.
    """
    half = next(iter(tree.values()))
    size, rank = half.shape
    if 4 * rank < size or 4 * rank > 3 * size:
        return tree
    onto = half.double() @ half.double().T
    eye = torch.eye(size, dtype=onto.dtype, device=onto.device)
    return {"projector": (eye - onto if "basis" in tree else onto).to(half.dtype)}


def project_out(matrix: Tensor, tree: Tensors) -> Tensor:
    """Return the rows of a matrix without their component in a subspace: D - (D O) O^T.

    Args:
        matrix: Rows, float [..., d].
        tree: Result of `Subspace.tree` or `projector`.

    """
    if "projector" in tree:
        return matrix @ tree["projector"]
    if "free" in tree:
        return (matrix @ tree["free"]) @ tree["free"].T
    return matrix - (matrix @ tree["basis"]) @ tree["basis"].T


@dataclass(frozen=True)
class Subspace:
    """A subspace of R^d, stored as the smaller of two orthonormal bases.

    Up to the rank d / 2 that is the subspace's basis; above, it is the basis of its complement. So
    memory, messages and the cost of a projection never exceed those of half the space, and a
    projection onto a small complement keeps its relative precision.

    Example:
        >>> space = Subspace.of(torch.eye(3)[:, :1])
        >>> space.project_out_rows(torch.ones(1, 3))
        tensor([[0., 1., 1.]])
    """

    basis: Tensor | None = None
    """Orthonormal basis of the subspace, float [d, rank], or None if `free` is given."""
    free: Tensor | None = None
    """Orthonormal basis of the complement, float [d, d - rank], or None if `basis` is given."""

    @classmethod
    def empty(cls, size: int) -> Subspace:
        """Return the subspace {0} of R^size."""
        return cls(basis=torch.zeros(size, 0))

    @classmethod
    def of(cls, basis: Tensor) -> Subspace:
        """Return the span of an orthonormal basis, float [d, rank]."""
        size, rank = basis.shape
        return cls(basis=basis) if 2 * rank <= size else cls(free=complement(basis))

    @classmethod
    def from_tree(cls, tree: Tensors) -> Subspace:
        """Return the subspace of a result of `tree`."""
        return cls(tree.get("basis"), tree.get("free"))

    def tree(self) -> Tensors:
        """Return the subspace as named tensors, which can be sent and stored."""
        if self.basis is not None:
            return {"basis": self.basis}
        assert self.free is not None
        return {"free": self.free}

    @property
    def size(self) -> int:
        """Dimension d of the space R^d."""
        return next(iter(self.tree().values())).shape[0]

    @property
    def rank(self) -> int:
        """Dimension of the subspace."""
        if self.basis is not None:
            return self.basis.shape[1]
        assert self.free is not None
        return self.size - self.free.shape[1]

    @property
    def fraction(self) -> float:
        """The part of the space's dimensions that the subspace takes."""
        return self.rank / self.size

    def project_out_rows(self, matrix: Tensor) -> Tensor:
        """Return the rows of a matrix without their component in the subspace."""
        return project_out(matrix, self.tree())

    def project_out_columns(self, columns: Tensor) -> Tensor:
        """Return columns without their component in the subspace."""
        tree = {form: half.to(columns) for form, half in self.tree().items()}
        return project_out(columns.T, tree).T

    def extended(self, candidates: Tensor) -> tuple[Subspace, Tensor]:
        """Return the sum with the span of candidates, float [d, n], and its new directions."""
        new = new_directions(candidates, self.project_out_columns)
        if self.basis is not None:
            known = self.basis.to(new.device)  # an empty basis may be on another device
            return Subspace.of(torch.cat([known, new.to(known)], dim=1)), new
        assert self.free is not None
        rest = self.free.double() @ complement(self.free.double().T @ new.double())
        return Subspace(free=rest.to(self.free.dtype)), new


# ---- Rules for how many directions of a decomposition are kept
#
# All functions take the singular values s in descending order, float [r].


def count_significant(singular: Tensor, scale: Tensor | None = None) -> int:
    """Return the number of singular values that are more than rounding.

    Args:
        singular: Singular values, float [r].
        scale: Size that rounding is relative to. If None, the largest singular value.

    """
    if len(singular) == 0:
        return 0
    largest = singular[0] if scale is None else scale
    return int((singular > TOLERANCE * largest).sum()) if largest > 0 else 0


def uncovered_rank(
    singular: Tensor, threshold: float, uncovered: float, energy: float | None = None
) -> int:
    """Return FOT's rank: the smallest r with (1 - rho) + rho * fraction_r > threshold.

    Args:
        singular: Singular values, float [r].
        threshold: Fraction of the inputs that the subspace should cover.
        uncovered: The paper's rho, the fraction of the inputs outside the subspace so far;
            fraction_r is that of the squared singular values in the first r. If 1 - rho is enough,
            the rank is 0.
        energy: Squared norm of which fraction_r is a fraction, if small values were left out. If
            None, that of the singular values.

    """
    if uncovered <= 1 - threshold:
        return 0
    squares = singular.double().square()
    fractions = squares.cumsum(0) / (squares.sum() if energy is None else energy)
    is_enough = (1 - uncovered) + uncovered * fractions > threshold
    return _first(is_enough, singular)


def mass_rank(singular: Tensor, threshold: float) -> int:
    """Return FedProTIP's rank (eq. 8): the smallest r whose s_i sum to `threshold` of their sum."""
    if count_significant(singular) == 0:
        return 0
    values = singular.double()
    return _first(values.cumsum(0) / values.sum() >= threshold, singular)


def energy_rank(singular: Tensor, threshold: float, total: float) -> int:
    """Return GPM's rank: the smallest r >= 0 with covered + sum_{i<=r} s_i^2 / total >= threshold.

    Args:
        singular: Singular values of the inputs after projection, float [r].
        threshold: Fraction of the inputs' energy that the subspace should cover.
        total: ||A||_F^2 of the inputs before projection, so that the subspace already covers
            1 - sum s^2 / total.

    """
    return covering_rank(singular, threshold, total, float(singular.double().square().sum()))


def covering_rank(singular: Tensor, threshold: float, total: float, outside: float) -> int:
    """Smallest r, from 0, with 1 - outside/total + sum_{i<=r} s_i^2/total >= threshold."""
    if total <= 0:
        return 0
    covered = 1 - outside / total
    if covered >= threshold:
        return 0
    return _first(covered + singular.double().square().cumsum(0) / total >= threshold, singular)


def _first(is_enough: Tensor, singular: Tensor) -> int:
    """Return 1 + the first index that is enough; if none is, the number of significant values."""
    indices = torch.nonzero(is_enough)
    largest = count_significant(singular)
    return min(int(indices[0]) + 1, largest) if len(indices) else largest
