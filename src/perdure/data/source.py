"""Labelled rows in memory, and the checks that every source passes before it is used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.core.errors import UserError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Examples:
    """Rows and labels: uint8 images [N, C, H, W], uint8 word counts [N, F], int32 tokens [N, L]."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return self.y.shape[0]

    def take(self, index: Array) -> Examples:
        """The rows at these places, in this order."""
        chosen = torch.from_numpy(index)
        return Examples(self.x[chosen], self.y[chosen])


@dataclass(frozen=True)
class Source:
    """What was read: a training and a test set over named classes."""

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    texts: tuple[list[str], list[str]] | None = None
    """The raw strings (training, test) of a text source, for models that tokenise themselves."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one row: (C, H, W) or (F,)."""
        return tuple(self.train.x.shape[1:])


@dataclass(frozen=True)
class ConfigLocation:
    """Where a source stands in the config, so that a mistake is reported under its own key."""

    key: str = "data"
    number: int = 0
    """Which source of a stream it is: each has draws of its own."""

    def error(self, key: str, value: object, allowed: str) -> UserError:
        """The one sentence for a bad value below this place."""
        return UserError(f"{self.key}.{key}: must be {allowed}, got {str(value)!r}")


def check_images(x: Array, name: str) -> Tensor:
    """Images as uint8 [N, C, H, W] from channels-last or grey arrays, else a ValueError."""
    if x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)):
        raise ValueError(
            f"{name} has shape {x.shape}, not N x H x W or N x H x W x channels (1, 3)"
        )
    if 0 in x.shape:
        raise ValueError(f"{name} holds no images (shape {x.shape})")
    if x.dtype.kind not in "ui" or (x.dtype != np.uint8 and (x.min() < 0 or x.max() > 255)):
        raise ValueError(f"{name} holds {x.dtype} values, not uint8 (0 to 255)")
    x = x.astype(np.uint8, copy=False)
    first = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(first))


def check_labels(y: Array, rows: int, name: str) -> Array:
    """Labels as int64 [rows], none negative; ValueError if they are not."""
    if y.shape != (rows,) and y.shape != (rows, 1):
        raise ValueError(f"{name} has shape {y.shape} for {rows} rows, not one label for each row")
    if y.dtype.kind not in "ui":
        raise ValueError(f"{name} holds {y.dtype} labels, not integers")
    if y.size and y.min() < 0:
        raise ValueError(f"{name} holds the label {y.min()}, not labels from 0 upwards")
    return y.reshape(rows).astype(np.int64)


def check_classes(train: Array, test: Array, names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the classes; ValueError where a label has none.

    Without given names, the training labels say how many classes there are. Labels that leave
    more than half of their range empty are taken for a corrupt file, not for a very sparse one.
    """
    if names is None:
        count, found = int(train.max()) + 1, len(np.unique(train))
        if 2 * found < count:
            raise ValueError(f"labels reach {count - 1} though only {found} different ones occur")
        names = tuple(str(label) for label in range(count))
    top = max(int(train.max()), int(test.max()) if test.size else 0)
    if top >= len(names):
        raise ValueError(f"the label {top} is out of range: there are {len(names)} classes")
    return names


def stratified(y: Array, fraction: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Rows for training and for testing, the same share of every class, both sorted.

    A class of two rows or more has at least one row on either side.
    """
    held_out = []
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        held_out.append(rows[:count])
    test = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(y)), test, assume_unique=True), test


def limited(source: Source, limit: int | None, rng: np.random.Generator) -> Source:
    """The source with at most `limit` training rows, drawn at random, in their old order."""
    if limit is None or limit >= len(source.train):
        return source
    keep = _drawn(len(source.train), limit, rng)
    texts = source.texts and ([source.texts[0][i] for i in keep], source.texts[1])
    return replace(source, train=source.train.take(keep), texts=texts)


def limited_test(source: Source, limit: int | None, rng: np.random.Generator) -> Source:
    """The source with at most `limit` test rows, drawn alike."""
    if limit is None or limit >= len(source.test):
        return source
    keep = _drawn(len(source.test), limit, rng)
    texts = source.texts and (source.texts[0], [source.texts[1][i] for i in keep])
    return replace(source, test=source.test.take(keep), texts=texts)


def _drawn(rows: int, limit: int, rng: np.random.Generator) -> Array:
    return np.sort(rng.choice(rows, limit, replace=False))
