"""The principal directions of a summed sketch, and how many of them noise has left."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.algebra.noise_edge import signal_energy, signal_values
from perdure.algebra.subspaces import Subspace, principal_directions


@dataclass(frozen=True)
class SketchSpectrum:
    """Principal directions of a matrix, with the singular values of what is not noise."""

    directions: Tensor
    """double [d, r]: orthonormal columns, in the order of their singular values."""
    singular: Tensor
    """double [r]: singular values, without the noise. 0 for directions that are noise."""
    energy: float
    """Squared norm of the matrix, without the noise; that below the noise's edge is included."""

    @property
    def rank(self) -> int:
        """The number of directions that are not noise."""
        return int((self.singular > 0).sum())


def sketch_spectrum(
    matrix: Tensor, sigma: float = 0.0, subspace: Subspace | None = None
) -> SketchSpectrum:
    """Return the principal directions of a matrix with Gaussian noise.

    Args:
        matrix: Float [d, n].
        sigma: Standard deviation of the noise on each entry. 0: all singular values count.
        subspace: A subspace that only noise has a component in, which is removed with the noise.
    """
    if not sigma:
        directions, singular = principal_directions(matrix)
        return SketchSpectrum(directions, singular, float(singular.square().sum()))
    rows, columns = matrix.shape
    if subspace is not None:
        matrix, rows = subspace.project_out_columns(matrix), rows - subspace.rank
    if rows == 0:
        return SketchSpectrum(*_nothing(matrix), 0.0)
    directions, singular = principal_directions(matrix)
    energy = signal_energy(singular, rows, columns, sigma)
    return SketchSpectrum(directions, signal_values(singular, rows, columns, sigma), energy)


def _nothing(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return no directions and no singular values."""
    return matrix[:, :0].double(), torch.zeros(0, dtype=torch.float64)
