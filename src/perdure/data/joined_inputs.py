"""Inputs of several tasks as one: each task's rows keep their permutation and normalization."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from perdure.data.inputs import Inputs


@dataclass(frozen=True)
class JoinedInputs:
    """The rows of several inputs, those of the first before those of the second, and so on.

    Nothing is copied: a row is gathered from the inputs that it comes from. Inputs may occur
    several times, such as the one data set that all tasks of a split stream draw from.

    Example:
        >>> rows = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
        >>> plain = Inputs(rows, (2,), torch.full((2,), 1 / 255), torch.zeros(2))
        >>> both = JoinedInputs((plain, plain.permuted(torch.tensor([1, 0]))))
        >>> both.gather(torch.tensor([1, 3])).mul(5).round().tolist()
        [[1.0, 2.0], [2.0, 1.0]]
    """

    parts: tuple[Inputs, ...]
    """The inputs in their order, with examples of one shape."""

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.parts[0].device

    @property
    def black(self) -> Tensor:
        """The normalized value of a black pixel, float [C]."""
        return self.parts[0].black

    def gather(self, index: Tensor) -> Tensor:
        """Return the normalized rows at some positions; see `Inputs.gather`."""
        return self._assemble(index, Inputs.gather)

    def gather_cached(self, index: Tensor) -> Tensor | None:
        """Return the cached features of the rows at `index`, or None if there are none."""
        if self.parts[0].cached_features is None:
            return None
        return self._assemble(index, _cached)

    def map(self, change: Callable[[Inputs], Inputs]) -> JoinedInputs:
        """Return the inputs with every part changed; a part that occurs twice is changed once."""
        changed = {id(part): change(part) for part in self._distinct}
        return JoinedInputs(tuple(changed[id(part)] for part in self.parts))

    def _assemble(self, index: Tensor, take: Callable[[Inputs, Tensor], Tensor]) -> Tensor:
        """Take rows from the parts that they come from: [*index.shape, ...]."""
        if len(self._distinct) == 1:
            return take(self._distinct[0], self._locate(index)[1])
        which, rows = self._locate(index.reshape(-1))
        used = torch.unique(which).tolist() or [0]
        places = [(which == number).nonzero().flatten() for number in used]
        taken = [take(self._distinct[n], rows[here]) for n, here in zip(used, places, strict=True)]
        values = torch.empty(len(rows), *taken[0].shape[1:]).to(taken[0])
        values[torch.cat(places)] = torch.cat(taken)
        return values.view(*index.shape, *values.shape[1:])

    def _locate(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return for each position the number of its distinct part, and the row in it."""
        ends, kinds = self._ends.to(index.device), self._kinds.to(index.device)
        part = torch.bucketize(index, ends[1:], right=True)
        return kinds[part], index - ends[part]

    @cached_property
    def _distinct(self) -> list[Inputs]:
        return list({id(part): part for part in self.parts}.values())

    @cached_property
    def _kinds(self) -> Tensor:
        """Position in `_distinct` of each part, int64 [parts]."""
        numbers = {id(part): number for number, part in enumerate(self._distinct)}
        return torch.tensor([numbers[id(part)] for part in self.parts])

    @cached_property
    def _ends(self) -> Tensor:
        """0, and the position after the last row of each part, int64 [parts + 1]."""
        return torch.tensor([0, *(len(part) for part in self.parts)]).cumsum(0)


AnyInputs = Inputs | JoinedInputs
"""Inputs of one task or of several."""


def _cached(part: Inputs, rows: Tensor) -> Tensor:
    vectors = part.gather_cached(rows)
    assert vectors is not None
    return vectors
