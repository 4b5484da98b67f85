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
        """Return a matrix R of at most d columns with R R^T = X X^T.

        If X X^T was formed, R is its symmetric root. That is a continuous function of X X^T, while
        rounding can flip the signs of eigenvectors, and with them a sketch of R.
        """
        if self._gram is None:
            return torch.cat(self._blocks, dim=1)
        grams = map(_gram, self._blocks)
        values, vectors = torch.linalg.eigh(sum(grams, start=self._gram))
        root: Tensor = ((vectors * values.clamp(min=0).sqrt()) @ vectors.T).float()
        return root


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
