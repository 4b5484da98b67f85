"""Sketches: random mixtures of a matrix's columns, their accumulation, and their noise's edge."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perdure.algebra.subspaces import Subspace, principal_directions

# ---- Gaussian sketches: random mixtures of columns that keep the columns' principal directions.


def gaussian_sketch(columns: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return X G with G ~ N(0, 1) of shape n x size: E[(X G)(X G)^T] = size * X X^T.

    Its distribution depends on X X^T alone, so any R with R R^T = X X^T can replace X.

    Args:
        columns: The matrix X, float [d, n].
        size: Number of columns of the sketch.
        generator: CPU generator that G is drawn from.

    Returns:
        The sketch, float [d, size].

    """
    mixing = torch.randn(columns.shape[1], size, generator=generator)
    sketch: Tensor = columns @ mixing.to(columns)
    return sketch


# ---- Accumulate the columns of a matrix block by block, without holding all of them


@dataclass
class GramAccumulator:
    """Accumulates X X^T of a matrix X whose columns arrive in blocks, holding at most d columns."""

    blocks: list[Tensor] = field(default_factory=list)
    gram: Tensor | None = None

    def add(self, block: Tensor) -> None:
        """Add n columns, float [d, n]."""
        self.blocks.append(block)
        if sum(columns.shape[1] for columns in self.blocks) > block.shape[0]:
            self._fold()

    def _fold(self) -> None:
        """Add the product of each block to X X^T, and drop the blocks."""
        for block in self.blocks:
            columns = block.double()
            gram = columns @ columns.T
            self.gram = gram if self.gram is None else self.gram + gram
        self.blocks = []

    def root(self) -> Tensor:
        """Return the symmetric root R = (X X^T)^(1/2), float [d, d].

        It is a continuous function of X X^T, while rounding can flip the signs of eigenvectors, and
        with them a sketch of R. Its columns are mixtures of all columns of X, so that a sketch of R
        never has single columns of X in it, however few there are.
        """
        if self.gram is None:
            columns = torch.cat(self.blocks, dim=1).double()
            vectors, lengths, _ = torch.linalg.svd(columns, full_matrices=False)
        else:
            self._fold()
            values, vectors = torch.linalg.eigh(self.gram)
            lengths = values.clamp(min=0).sqrt()
        root: Tensor = (vectors * lengths) @ vectors.T
        return root.float()


@dataclass
class ColumnSample:
    """A uniform sample without replacement of at most `count` of all added columns.

    Each column gets a random number, and those with the smallest numbers are kept.
    """

    _count: int
    _generator: torch.Generator
    _columns: Tensor | None = None
    _keys: Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(self, block: Tensor) -> None:
        """Add n columns, float [d, n]."""
        keys = torch.rand(block.shape[1], generator=self._generator, dtype=torch.float64)
        block, keys = self._smallest(block, keys)
        if self._columns is not None:
            block, keys = torch.cat([self._columns, block], dim=1), torch.cat([self._keys, keys])
            block, keys = self._smallest(block, keys)
        self._columns, self._keys = block, keys

    def _smallest(self, block: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns with the smallest keys, and these keys, in their order."""
        keys, chosen = keys.topk(min(self._count, len(keys)), largest=False)
        return block[:, chosen.to(block.device)], keys

    def columns(self) -> Tensor:
        """Return the sampled columns, float [d, at most count]."""
        assert self._columns is not None
        return self._columns


# ---- Singular values of a matrix with Gaussian noise: which of them are signal, and how large
# it is
#
# The singular values of an m x n matrix of independent N(0, sigma^2) end at sigma (sqrt m + sqrt n)
# (Bai and Yin 1988). A larger one belongs to a signal; below, noise and signal look alike, and the
# directions are those of the noise.

_QUANTILE = 3.27
"""Of the Tracy-Widom law of real matrices: the largest value of noise exceeds it once in 1,000."""


def noise_edge(rows: int, columns: int, sigma: float) -> float:
    """Return the singular value that a matrix of noise alone exceeds once in 1,000 draws.

    It is sigma (sqrt m + sqrt n), and a margin for the spread of the largest value about it
    (Johnstone 2001), which vanishes for large matrices.
    """
    m, n = math.sqrt(rows), math.sqrt(columns)
    spread = (m + n) * (1 / m + 1 / n) ** (1 / 3)
    return sigma * math.sqrt((m + n) ** 2 + _QUANTILE * spread)


def signal_values(singular: Tensor, rows: int, columns: int, sigma: float) -> Tensor:
    """Return the singular values of the signal: 0 below the noise's edge, smaller ones above it.

    A singular value x of the signal appears in the sum as y with
        y^2 = (x^2 + sigma^2 m) (x^2 + sigma^2 n) / x^2
    (Benaych-Georges and Nadakuditi 2012), which is solved for x.

    Args:
        singular: Singular values y of signal and noise together, float [r].
        rows: m.
        columns: n.
        sigma: Standard deviation of the noise on each entry. 0: nothing is changed.

    """
    if not sigma or not len(singular):
        return singular
    squares = singular.double().square() - sigma**2 * (rows + columns)
    root = (squares.square() - 4 * sigma**4 * rows * columns).clamp(min=0).sqrt()
    is_signal = singular > noise_edge(rows, columns, sigma)
    return torch.where(is_signal, ((squares + root) / 2).clamp(min=0).sqrt(), 0.0)


def signal_energy(singular: Tensor, rows: int, columns: int, sigma: float) -> float:
    """Return an estimate of the signal's squared norm, from the squared norm of the sum.

    It is at least that of the `signal_values`, which the sum's may be below by chance.

    Args:
        singular: Singular values of signal and noise together, float [r].
        rows: m.
        columns: n.
        sigma: Standard deviation of the noise on each entry.

    """
    total = float(singular.double().square().sum()) - sigma**2 * rows * columns
    return max(total, float(signal_values(singular, rows, columns, sigma).square().sum()))


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
        return SketchSpectrum(matrix[:, :0].double(), torch.zeros(0, dtype=torch.float64), 0.0)
    directions, singular = principal_directions(matrix)
    energy = signal_energy(singular, rows, columns, sigma)
    return SketchSpectrum(directions, signal_values(singular, rows, columns, sigma), energy)
