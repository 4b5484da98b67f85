"""Subspaces of a layer's inputs by orthonormal bases, and what is left of a matrix without them.

A weight W is out x in, inputs are columns of length d = in, and a basis O is d x r with orthonormal
columns. A change D of W leaves the outputs for all inputs in span(O) alone exactly if D O = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.core.trees import Tensors

TOLERANCE = 1e-6
"""Directions shorter than this share of the longest one are rounding, not directions."""


def project_out_rows(matrix: Tensor, basis: Tensor) -> Tensor:
    """D - (D O) O^T: the rows of D without their part in span(O)."""
    return matrix - (matrix @ basis) @ basis.T


def project_onto(matrix: Tensor, basis: Tensor) -> Tensor:
    """(D N) N^T: the part of the rows of D in span(N)."""
    return (matrix @ basis) @ basis.T


def project_out_columns(columns: Tensor, basis: Tensor) -> Tensor:
    """X - O O^T X: the columns of X without their part in span(O)."""
    return columns - basis @ (basis.T @ columns)


def complement(basis: Tensor) -> Tensor:
    """An orthonormal basis of all that is orthogonal to span(O): d x (d - r)."""
    full: Tensor = torch.linalg.qr(basis.double(), mode="complete")[0]
    return full[:, basis.shape[1] :].to(basis.dtype).contiguous()


def new_directions(
    candidates: Tensor, without: Callable[[Tensor], Tensor] = lambda columns: columns
) -> Tensor:
    """An orthonormal basis of what the candidates span beyond a known subspace.

    `without` takes the known part away from columns. It is applied twice, because once leaves
    rounding of the size of what it took. Dependent candidates add nothing: a plain QR would invent
    directions for them. The result's span does not depend on the order of the candidates.
    """
    columns = candidates.double()
    if columns.shape[1] == 0:
        return candidates
    scale = torch.linalg.matrix_norm(columns, ord=2)
    left, lengths, _ = torch.linalg.svd(without(without(columns)), full_matrices=False)
    new: Tensor = left[:, lengths > TOLERANCE * scale].to(candidates.dtype)
    return new


def principal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Left singular vectors (as columns) and singular values, largest first, at most d of them.

    A wide matrix goes through the eigenvectors of X X^T in double precision, which is much cheaper
    and exact for singular values above 1e-8 of the largest.
    """
    columns = matrix.double()
    if columns.shape[1] <= columns.shape[0]:
        left, values, _ = torch.linalg.svd(columns, full_matrices=False)
        return left, values
    squares, vectors = torch.linalg.eigh(columns @ columns.T)
    return vectors.flip(1), squares.flip(0).clamp(min=0).sqrt()


def extend(basis: Tensor, candidates: Tensor) -> Tensor:
    """[O, new]: an orthonormal basis of span(O) + span(candidates), at most d columns."""
    known = basis.double()
    return torch.cat(
        [basis, new_directions(candidates, lambda x: project_out_columns(x, known))], dim=1
    )


def projector(tree: Tensors) -> Tensors:
    """A space's tree ready for many projections: I - O O^T, where one product beats two thin ones.

    With a quarter to three quarters of the space taken that costs no more operations, and rounding
    is still far below what is left of a matrix.
    """
    half = next(iter(tree.values()))
    size, rank = half.shape
    if 4 * rank < size or 4 * rank > 3 * size:
        return tree
    onto = half.double() @ half.double().T
    eye = torch.eye(size, dtype=onto.dtype, device=onto.device)
    return {"projector": (eye - onto if "basis" in tree else onto).to(half.dtype)}


def project_out(matrix: Tensor, tree: Tensors) -> Tensor:
    """The rows of a matrix without their part in a space, given as its tree or as a projector."""
    if "projector" in tree:
        return matrix @ tree["projector"]
    return Subspace.read(tree).project_out_rows(matrix)


@dataclass(frozen=True)
class Subspace:
    """A subspace of R^d, held by the smaller of two orthonormal bases.

    Up to half of R^d that is its own basis; beyond, the basis of what is still free. So neither
    memory, nor messages, nor the cost of a projection ever exceed those of half the space, and what
    is projected on the free rest keeps its relative precision however little is left.
    """

    basis: Tensor | None = None
    free: Tensor | None = None

    @classmethod
    def empty(cls, size: int) -> Subspace:
        """The subspace {0} of R^size."""
        return cls(basis=torch.zeros(size, 0))

    @classmethod
    def of(cls, basis: Tensor) -> Subspace:
        """The span of an orthonormal basis."""
        size, rank = basis.shape
        return cls(basis=basis) if 2 * rank <= size else cls(free=complement(basis))

    @classmethod
    def read(cls, tree: Tensors) -> Subspace:
        """The inverse of tree."""
        return cls(tree.get("basis"), tree.get("free"))

    def tree(self) -> Tensors:
        """The space as named tensors, which travel and are kept."""
        if self.basis is not None:
            return {"basis": self.basis}
        assert self.free is not None
        return {"free": self.free}

    @property
    def size(self) -> int:
        """The d of R^d."""
        return next(iter(self.tree().values())).shape[0]

    @property
    def rank(self) -> int:
        """Its number of dimensions."""
        if self.basis is not None:
            return self.basis.shape[1]
        assert self.free is not None
        return self.size - self.free.shape[1]

    def project_out_rows(self, matrix: Tensor) -> Tensor:
        """The rows of a matrix without their part in the space."""
        if self.basis is not None:
            return project_out_rows(matrix, self.basis)
        assert self.free is not None
        return project_onto(matrix, self.free)

    def project_out_columns(self, columns: Tensor) -> Tensor:
        """Columns without their part in the space."""
        return self._like(columns).project_out_rows(columns.T).T

    def extended(self, candidates: Tensor) -> tuple[Subspace, Tensor]:
        """The sum with the span of the candidates, and the orthonormal directions that are new."""
        new = new_directions(candidates, self.project_out_columns)
        if self.basis is not None:
            known = self.basis.to(new.device)  # an empty one is not yet where the candidates are
            return Subspace.of(torch.cat([known, new.to(known)], dim=1)), new
        assert self.free is not None
        rest = self.free.double() @ complement(self.free.double().T @ new.double())
        return Subspace(free=rest.to(self.free.dtype)), new

    def _like(self, columns: Tensor) -> Subspace:
        return Subspace(
            *(None if half is None else half.to(columns) for half in (self.basis, self.free))
        )
