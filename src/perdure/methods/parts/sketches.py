"""Sketches that FOT sums: their principal directions, and the noise that hides a client's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perdure.algebra.sketches import signal_energy, signal_values
from perdure.algebra.subspaces import Subspace, principal_directions
from perdure.core.registry import is_installed
from perdure.core.trees import Tensors
from perdure.privacy import accounting
from perdure.privacy.accounting import clip_norm, fot_sigma, gaussian_sigma

# ------------------------------------------------------------------------------------------------
# The principal directions of a summed sketch, and how many of them noise has left.
# ------------------------------------------------------------------------------------------------


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


# ------------------------------------------------------------------------------------------------
# The Gaussian mechanism on sketches (FOT, appendix H), and the privacy that it guarantees.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SketchNoise:
    """Clips each client's sketch of a layer to the norm L, and adds N(0, sigma^2) to each entry."""

    kind: Literal["paper", "standard"]
    """`paper`: sigma^2 = log(1.25 / delta) / (epsilon^2 C), as printed. `standard`: the Gaussian
    mechanism for the sum over clients, with its factor 2 and L; the fraction in [0, 1] that a
    client sends with its sketch gets noise, too."""
    epsilon: float
    """Privacy level of one sum."""
    delta: float
    """Probability with which the privacy level may be exceeded."""
    clip: float
    """L: largest Frobenius norm of a client's sketch."""

    def sigma(self, clients: int, sensitivity: float) -> float:
        """Return the standard deviation of the noise that each of C = `clients` clients adds."""
        count = max(1, clients)
        if self.kind == "paper":
            return fot_sigma(self.epsilon, self.delta, count)
        return gaussian_sigma(self.epsilon, self.delta, count, sensitivity)

    def add_noise(
        self, sketches: Tensors, fractions: Tensors, clients: int, generator: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Return one client's sketches and fractions as they are sent."""
        sigma = self.sigma(clients, self.clip)
        noisy = {
            name: clip_norm(sketch, self.clip) + _noise(sketch, sigma, generator)
            for name, sketch in sketches.items()
        }
        if self.kind == "paper":
            return noisy, fractions
        sigma = self.sigma(clients, 1.0)
        return noisy, {name: f + _noise(f, sigma, generator) for name, f in fractions.items()}

    def describe_guarantee(self, layers: int, tasks: int | None = None) -> str:
        """Return a sentence about what this noise does and does not guarantee."""
        level = f"({self.epsilon:g}, {self.delta:g})"
        if self.kind == "paper":
            return (
                f"privacy 'paper': noise as printed in FOT's appendix H for {level}; no (epsilon, "
                "delta) guarantee is claimed, because the printed variance lacks a factor 2 and "
                "the fractions that are sent with the sketches have no noise"
            )
        text = self._standard_guarantee(level, layers, tasks)
        if self.epsilon < 1:
            return text
        return (
            f"{level} of a single sum is not a proved guarantee, since its formula holds for "
            f"epsilon < 1 only; {text}"
        )

    def _standard_guarantee(self, level: str, layers: int, tasks: int | None) -> str:
        over = "per task" if tasks is None else f"tasks so far: {tasks}"
        releases = 2 * layers * (1 if tasks is None else tasks)
        return (
            "privacy 'standard': under secure aggregation and if every client uploads, each "
            f"summed sketch and each fraction is {level}-differentially private for adding or "
            f"removing a client (for replacing one, epsilon is {2 * self.epsilon:g}); over "
            f"{layers} layers ({over}) {self._composed(releases)}; "
            "the model updates themselves are not covered; in a simulation the noise derives "
            "from the run's seed and can be subtracted"
        )

    def _composed(self, releases: int) -> str:
        """Return the guarantee of all sums together; Renyi accounting is tighter."""
        basic = f"basic composition gives ({releases * self.epsilon:g}, {releases * self.delta:g})"
        if not is_installed("dp_accounting"):
            return f"{basic} (a tighter bound requires pip install 'perdure[privacy]')"
        total = accounting.epsilon(self.sigma(1, 1.0), releases, self.delta)
        return f"{basic}, and Renyi accounting of the same noise ({total:.4g}, {self.delta:g})"


def _noise(value: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    return (sigma * torch.randn(value.shape, generator=generator)).to(value)
