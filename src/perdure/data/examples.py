"""Labeled examples, from the reader of a file to the local step: stored once, never copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
Text = str | tuple[str, str]
"""A text, or a pair of them."""

# ---- Labeled examples: stored once as uint8 or float32, normalized when a batch is gathered


class RowFeatures(Protocol):
    """One vector per row that is gathered beside the row, such as cached features."""

    def gather(self, index: Tensor) -> Tensor:
        """Return the vectors of the rows at `index`: [*index.shape, size]."""


@dataclass(frozen=True)
class Normalization:
    """What is done to the values of a row before a model sees them."""

    scale: Tensor
    """Factor per value, float32 [D]."""
    shift: Tensor
    """Added per value after the factor, float32 [D]."""
    uniform: tuple[float, Tensor] | None = None
    """Scale and shift if they are the same for all values, which saves a pass over the batch."""

    def apply(self, rows: Tensor) -> Tensor:
        """Return rows [N, D] as float32; tokens (int32) are not normalized."""
        if rows.dtype == torch.int32:
            return rows
        if self.uniform is None:
            return torch.addcmul(self.shift, rows.to(torch.float32), self.scale)
        return torch.add(self.uniform[1], rows, alpha=self.uniform[0])


@dataclass(frozen=True)
class Examples:
    """Labeled examples: stored values, and what is done to them when rows are gathered.

    Tasks that differ in the order of values or in their labels share the stored values.

    Example:
        >>> x = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
        >>> pixels = Normalization(torch.full((2,), 1 / 255), torch.zeros(2))
        >>> examples = Examples(x, torch.tensor([0, 1]), normalization=pixels)
        >>> examples.gather(torch.tensor([1])).mul(5).round().tolist()
        [[1.0, 2.0]]
    """

    x: Tensor
    """uint8 images [N, C, H, W], uint8 word counts [N, F] or int32 tokens [N, L]; or float32
    features [N, F], time series [N, C, L] or images [N, C, H, W]."""
    y: Tensor
    """Labels, int64 [N]; or numbers, double [N] and after normalization float32."""
    clients: Tensor | None = None
    """Number of the client of each row in `Source.client_names`, int64 [N]. If None, the data does
    not name clients."""
    texts: list[Text] | None = None
    """The texts of the rows, for models with their own tokenizer. If None, there are none."""
    normalization: Normalization | None = None
    """If None, rows are gathered as they are stored."""
    permutation: Tensor | None = None
    """int64 [D]: value j of a gathered row is value `permutation[j]` of the normalized row."""
    cached_features: RowFeatures | None = None
    """Cached features of each row. If None, there are none."""

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example: (C, H, W), (C, L), (F,) or (L,), with D values."""
        return tuple(self.x.shape[1:])

    @cached_property
    def rows(self) -> Tensor:
        """The stored values of each row, [N, D]."""
        return self.x.reshape(len(self.x), -1)

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.x.device

    @property
    def origins(self) -> Tensor | None:
        """The task that each row comes from, if there are several; see `JoinedExamples`."""
        return None

    @property
    def black(self) -> Tensor:
        """The normalized value of a black pixel (0 before normalization), float [C]."""
        assert self.normalization is not None
        return self.normalization.shift.view(self.x.shape[1], -1)[:, 0]

    def gather(self, index: Tensor) -> Tensor:
        """Return the normalized rows at some positions.

        Returns:
            float32 [*index.shape, *shape]; int32 for tokens.

        """
        x = self.rows.index_select(0, index.reshape(-1))
        if self.normalization is not None:
            x = self.normalization.apply(x)
        if self.permutation is not None:
            x = x.index_select(1, self.permutation)
        return x.view(*index.shape, *self.x.shape[1:])

    def gather_cached(self, index: Tensor) -> Tensor | None:
        """Return the cached features of the rows at `index`, or None if there are none."""
        return None if self.cached_features is None else self.cached_features.gather(index)

    def select(self, index: Array) -> Examples:
        """Return the examples at the positions `index` (int64), in that order, as a copy."""
        rows = torch.from_numpy(index)
        clients = None if self.clients is None else self.clients[rows]
        texts = None if self.texts is None else [self.texts[row] for row in index.tolist()]
        return replace(self, x=self.x[rows], y=self.y[rows], clients=clients, texts=texts)

    def map(self, change: Callable[[Examples], Examples]) -> Examples:
        """Return the changed examples; `JoinedExamples.map` changes each of its parts."""
        return change(self)


# ---- Examples of several tasks as one: each task's rows keep their permutation and normalization.


@dataclass(frozen=True)
class JoinedExamples:
    """The rows of several examples, those of the first before those of the second, and so on.

    Nothing is copied but labels: a row is gathered from the examples that it comes from. Examples
    may occur several times, such as the one data set that all tasks of a split stream draw from.

    Example:
        >>> x = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8)
        >>> plain = Examples(x, torch.tensor([0, 1]))
        >>> both = JoinedExamples((plain, replace(plain, permutation=torch.tensor([1, 0]))))
        >>> both.gather(torch.tensor([1, 3])).tolist(), both.y.tolist()
        ([[51, 102], [102, 51]], [0, 1, 0, 1])
    """

    parts: tuple[Examples, ...]
    """The examples in their order, all of one shape."""

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def device(self) -> torch.device:
        """The device of the rows."""
        return self.parts[0].device

    @cached_property
    def y(self) -> Tensor:
        """Labels or numbers of all rows."""
        return torch.cat([part.y for part in self.parts])

    @cached_property
    def origins(self) -> Tensor:
        """The part, which is the task, that each row comes from: int64 [rows]."""
        sizes = torch.tensor([len(part) for part in self.parts], device=self.device)
        return torch.arange(len(self.parts), device=self.device).repeat_interleave(sizes)

    @property
    def clients(self) -> Tensor | None:
        """Nothing: what is joined is trained on, by the clients of a partition."""
        return None

    @property
    def black(self) -> Tensor:
        """The normalized value of a black pixel, float [C]."""
        return self.parts[0].black

    def gather(self, index: Tensor) -> Tensor:
        """Return the normalized rows at some positions; see `Examples.gather`."""
        return self._assemble(index, Examples.gather)

    def gather_cached(self, index: Tensor) -> Tensor | None:
        """Return the cached features of the rows at `index`, or None if there are none."""
        if self.parts[0].cached_features is None:
            return None
        return self._assemble(index, _cached)

    def map(self, change: Callable[[Examples], Examples]) -> JoinedExamples:
        """Return the examples with every part changed; one that occurs twice is changed once."""
        changed = {id(part): change(part) for part in self._distinct}
        return JoinedExamples(tuple(changed[id(part)] for part in self.parts))

    def _assemble(self, index: Tensor, take: Callable[[Examples, Tensor], Tensor]) -> Tensor:
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
    def _distinct(self) -> list[Examples]:
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


AnyExamples = Examples | JoinedExamples
"""Examples of one task or of several."""


def _cached(part: Examples, rows: Tensor) -> Tensor:
    vectors = part.gather_cached(rows)
    assert vectors is not None
    return vectors


# ---- A source: training and test examples over named classes


@dataclass(frozen=True)
class NumberScale:
    """Mean and standard deviation by which numbers are standardized for training."""

    mean: float
    std: float

    def standardize(self, values: Tensor) -> Tensor:
        """Return numbers in their own unit, of any shape, as targets of training, float32."""
        return ((values.double() - self.mean) / self.std).float()

    def restore(self, values: Tensor) -> Tensor:
        """Return outputs of a model in the unit of the data, double."""
        return values.double() * self.std + self.mean


@dataclass(frozen=True)
class Source:
    """A training and a test set over named classes."""

    name: str
    train: Examples
    test: Examples
    class_names: tuple[str, ...]
    """The name of every class, by label."""
    feature_names: tuple[str, ...] | None = None
    """The columns of a table that are features, in their order."""
    client_names: tuple[str, ...] | None = None
    """The clients that hold rows. If None, the data does not name clients."""
    numbers: NumberScale | None = None
    """How numbers were standardized. If None, targets are classes, or not normalized yet."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example: (C, H, W), (C, L), (F,) or (L,)."""
        return self.train.shape

    def map(self, change: Callable[[Examples], Examples]) -> Source:
        """Return the source with its training and its test examples changed."""
        return replace(self, train=change(self.train), test=change(self.test))
