"""Accumulate the columns of a matrix block by block, without holding all of them."""

from __future__ import annotations

import torch
from torch import Tensor


class GramAccumulator:
    """Columns X of which only X X^T is of interest: at most d of them are held."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._gram: Tensor | None = None

    def add(self, block: Tensor) -> None:
        """Take in d x n more columns."""
        self._blocks.append(block)
        if sum(part.shape[1] for part in self._blocks) > block.shape[0]:
            for part in self._blocks:
                more = part.double() @ part.double().T
                self._gram = more if self._gram is None else self._gram + more
            self._blocks = []

    def root(self) -> Tensor:
        """A matrix R of at most d columns with R R^T = X X^T.

        Of a product it is the symmetric one: that is a continuous function of the product, while
        eigenvectors alone have signs that any rounding can turn, and a sketch of R with them.
        """
        if self._gram is None:
            return torch.cat(self._blocks, dim=1)
        held = [part.double() @ part.double().T for part in self._blocks]
        values, vectors = torch.linalg.eigh(sum(held, start=self._gram))
        root: Tensor = ((vectors * values.clamp(min=0).sqrt()) @ vectors.T).float()
        return root


class ColumnSample:
    """At most `count` columns, drawn uniformly without replacement from all that are added.

    Each column gets a random number, and those with the smallest ones stay.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self._count, self._generator = count, generator
        self._columns: Tensor | None = None
        self._keys = torch.zeros(0)

    def add(self, block: Tensor) -> None:
        """Take in d x n more columns."""
        keys = torch.rand(block.shape[1], generator=self._generator, dtype=torch.float64)
        if self._columns is not None:
            block, keys = torch.cat([self._columns, block], dim=1), torch.cat([self._keys, keys])
        best = keys.argsort()[: self._count]
        self._columns, self._keys = block[:, best.to(block.device)], keys[best]

    def columns(self) -> Tensor:
        """The columns that were drawn."""
        assert self._columns is not None
        return self._columns
