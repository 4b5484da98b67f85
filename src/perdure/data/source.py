"""Sources: labeled training and test examples in memory, over named classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.config import ColumnPartition, NaturalPartition
from perdure.core.errors import UserError

Array = np.ndarray[Any, Any]
Text = str | tuple[str, str]
"""A text, or a pair of them."""


@dataclass(frozen=True)
class Examples:
    """Labeled examples."""

    x: Tensor
    """uint8 images [N, C, H, W], uint8 word counts [N, F] or int32 tokens [N, L]; or float32
    features [N, F], time series [N, C, L] or images [N, C, H, W]."""
    y: Tensor
    """Labels, int64 [N]; or numbers, double [N], with `data.target: number`."""
    clients: Tensor | None = None
    """Number of the client of each row in `Source.client_names`, int64 [N]. If None, the data does
    not name clients."""

    def __len__(self) -> int:
        return self.y.shape[0]

    def select(self, index: Array) -> Examples:
        """Return the examples at the positions `index` (int64), in that order."""
        rows = torch.from_numpy(index)
        clients = None if self.clients is None else self.clients[rows]
        return Examples(self.x[rows], self.y[rows], clients)


@dataclass(frozen=True)
class Source:
    """A training and a test set over named classes."""

    name: str
    train: Examples
    test: Examples
    class_names: tuple[str, ...]
    """The name of every class, by label."""
    texts: tuple[list[Text], list[Text]] | None = None
    """The texts (training, test) of a text source, for models with their own tokenizer."""
    feature_names: tuple[str, ...] | None = None
    """The columns of a table that are features, in their order."""
    client_names: tuple[str, ...] | None = None
    """The clients that hold rows. If None, the data does not name clients."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example: (C, H, W), (C, L), (F,) or (L,)."""
        return tuple(self.train.x.shape[1:])


@dataclass(frozen=True)
class ConfigLocation:
    """The position of a source in the config, for error messages and random draws."""

    key: str = "data"
    """Key of the section that describes the source."""
    number: int = 0
    """Number of the source within its stream, by which its random draws differ."""
    clients: NaturalPartition | None = None
    """The partition, if the data says which client holds a row."""
    numbers: bool = False
    """Whether targets are numbers, by `data.target`."""
    is_node: bool = False
    """Whether it is the local data of a node, which may lack classes that it is tested on."""

    @property
    def client_column(self) -> str | None:
        """The column that names the client of a row. None if there is none."""
        return self.clients.name if isinstance(self.clients, ColumnPartition) else None

    def client_error(self, expected: str) -> UserError:
        """Return the error for a column of clients that is not there."""
        return UserError(
            f"clients.partition.name: must be {expected}, got {str(self.client_column)!r}"
        )

    def error(self, key: str, value: object, expected: str) -> UserError:
        """Return the error for a bad value of a key in this section."""
        return UserError(f"{self.key}.{key}: must be {expected}, got {str(value)!r}")
