"""Accumulate the columns of a matrix block by block, without holding all of them."""

from __future__ import annotations

import torch
from torch import Tensor


class GramAccumulator:
    """Accumulates X X^T of a matrix X whose columns arrive in blocks, holding at most d columns."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._gram: Tensor | None = None

    def add(self, block: Tensor) -> None:
        """Add n columns, float [d, n]."""
        self._blocks.append(block)
        if sum(columns.shape[1] for columns in self._blocks) > block.shape[0]:
            for columns in self._blocks:
                gram = _gram(columns)
                self._gram = gram if self._gram is None else self._gram + gram
            self._blocks = []

    def root(self) -> Tensor:
        """Return the symmetric root R = (X X^T)^(1/2), float [d, d].

        It is a continuous function of X X^T, while rounding can flip the signs of eigenvectors, and
        with them a sketch of R. Its columns are mixtures of all columns of X, so that a sketch of R
        never has single columns of X in it, however few there are.
        """
        if self._gram is None:
            columns = torch.cat(self._blocks, dim=1).double()
            vectors, lengths, _ = torch.linalg.svd(columns, full_matrices=False)
            return _symmetric(vectors, lengths)
        grams = map(_gram, self._blocks)
        values, vectors = torch.linalg.eigh(sum(grams, start=self._gram))
        return _symmetric(vectors, values.clamp(min=0).sqrt())


def _symmetric(vectors: Tensor, values: Tensor) -> Tensor:
    """Return V diag(values) V^T, in single precision."""
    return ((vectors * values) @ vectors.T).float()


def _gram(columns: Tensor) -> Tensor:
    columns = columns.double()
    return columns @ columns.T


class ColumnSample:
    """A uniform sample without replacement of at most `count` of all added columns.

    Each column gets a random number, and those with the smallest numbers are kept.

    Args:
        count: Largest number of columns in the sample.
        generator: CPU generator of the random numbers.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self._count, self._generator = count, generator
        self._columns: Tensor | None = None
        self._keys = torch.zeros(0)

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
