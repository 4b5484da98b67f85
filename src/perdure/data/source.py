"""Where a source stands in the config, and the checks that the arrays of every source pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from perdure.config import DataConfig, PartitionConfig
from perdure.config.section import OpenFraction, PositiveInt, Text, TextColumn
from perdure.core.errors import UserError
from perdure.data.examples import Array


@dataclass(frozen=True)
class ConfigLocation:
    """The position of a source in the config, for error messages and random draws."""

    key: str = "data"
    """Key of the section that describes the source."""
    number: int = 0
    """Number of the source within its stream, by which its random draws differ."""
    clients: PartitionConfig | None = None
    """The partition, if the data says which client holds a row."""
    numbers: bool = False
    """Whether targets are numbers, by `data.target`."""
    is_node: bool = False
    """Whether it is the local data of a node, which may lack classes that it is tested on."""

    @property
    def in_client_folders(self) -> bool:
        """Whether every client has a folder."""
        return self.clients is not None and self.clients.in_folders

    @property
    def client_column(self) -> str | None:
        """The column that names the client of a row. None if there is none."""
        return None if self.clients is None else self.clients.column

    def client_error(self, expected: str) -> UserError:
        """Return the error for a column of clients that is not there."""
        return UserError(
            f"clients.partition.name: must be {expected}, got {str(self.client_column)!r}"
        )

    def error(self, key: str, value: object, expected: str) -> UserError:
        """Return the error for a bad value of a key in this section."""
        return UserError(f"{self.key}.{key}: must be {expected}, got {str(value)!r}")


class ObjectKeys(DataConfig):
    """How objects that were made in Python are read: arrays, data sets and frames."""

    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if there is no test data."""
    label_column: Text = "label"
    """Column of the labels in a pandas DataFrame or Hugging Face data set."""
    feature_columns: Annotated[list[Text], Field(min_length=1)] | None = None
    """Columns of the features in a DataFrame. Default: all columns without another use."""
    split_column: Text | None = None
    """Column of a DataFrame that is `train` or `test`. If None, the rows are split with the
    seed."""
    domain_column: Text | None = None
    """Column of a DataFrame that names the domain of a row, for domain streams."""
    image_column: Text = "image"
    """Column of the images in a Hugging Face data set. If it does not have it, `text_column` is
    read."""
    text_column: TextColumn = "text"
    """Column of the texts in a Hugging Face data set or DataFrame, or two of pairs of texts."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""


# ---- Checks that the arrays of every source pass. They raise ValueError; readers add the path

_LAYOUTS = "N x features, N x channels x length or N x H x W x channels"
_FEW_CHANNELS = (1, 3)
_MOST_COLORS = 4
"""Arrays with more channels than this, and 1 or 3 rows of pixels, have their channels first."""


def check_inputs(x: Array, name: str) -> Tensor:
    """Return inputs with the channels first.

    Args:
        x: Images as in `check_images`; numbers [N, F]; or floats as in `check_features`.
        name: Name of the array in error messages.

    Returns:
        uint8 for images of integers, else float32: [N, F], [N, C, L] or [N, C, H, W].

    Raises:
        ValueError: `x` has another shape or other values.

    """
    return check_features(x, name) if x.ndim == 2 or x.dtype.kind == "f" else check_images(x, name)


def check_tensor(x: Tensor, name: str) -> Tensor:
    """Return a tensor, whose images have their channels first, as `check_inputs` returns it."""
    values = x.detach().cpu()
    if values.dim() < 4:
        return check_inputs(values.numpy(), name)
    return check_inputs(values.flatten(2).numpy(), name).reshape(values.shape)


def check_features(x: Array, name: str, allow_nan: bool = False) -> Tensor:
    """Return numbers as float32, with the channels of images first.

    Args:
        x: Numbers [N, F] (feature vectors), [N, C, L] (time series) or [N, H, W, C] (images).
        name: Name of the array in error messages.
        allow_nan: Whether values may be NaN or infinite.

    Returns:
        float32 [N, F], [N, C, L] or [N, C, H, W].

    Raises:
        ValueError: `x` has another shape, or values that are not finite.

    """
    if x.dtype.kind not in "fuib":
        raise ValueError(f"{name} contains {x.dtype} values, not numbers")
    if x.ndim not in (2, 3, 4):
        raise ValueError(f"{name} has shape {x.shape}, not {_LAYOUTS}")
    if 0 in x.shape:
        raise ValueError(f"{name} contains no values (shape {x.shape})")
    with np.errstate(over="ignore"):
        values = np.ascontiguousarray(_channels_first(x, name), np.float32)
    if not allow_nan and not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values.reshape(len(values), -1)).all(1)))
        raise ValueError(f"{name} contains a value in row {row} that is NaN, infinite or too large")
    return torch.from_numpy(values)


def _channels_first(x: Array, name: str) -> Array:
    """Return images [N, H, W, C] as [N, C, H, W], and other arrays unchanged."""
    if x.ndim != 4:
        return x
    if x.shape[1] in _FEW_CHANNELS and x.shape[3] > _MOST_COLORS:
        raise ValueError(
            f"{name} has shape {x.shape}, in which channels come first, not N x H x W x channels"
        )
    return x.transpose(0, 3, 1, 2)


def check_images(x: Array, name: str) -> Tensor:
    """Return images with the channels first.

    Args:
        x: Integers from 0 to 255, [N, H, W] or [N, H, W, C].
        name: Name of the array in error messages.

    Returns:
        uint8 [N, C, H, W].

    Raises:
        ValueError: `x` has another shape or other values.

    """
    if x.ndim not in (3, 4):
        raise ValueError(f"{name} has shape {x.shape}, not N x H x W or N x H x W x channels")
    if 0 in x.shape:
        raise ValueError(f"{name} contains no images (shape {x.shape})")
    if x.dtype.kind not in "ui" or (x.dtype != np.uint8 and (x.min() < 0 or x.max() > 255)):
        raise ValueError(f"{name} contains {x.dtype} values, not uint8 (0 to 255) or floats")
    x = x.astype(np.uint8, copy=False)
    channels_first = x[:, None] if x.ndim == 3 else _channels_first(x, name)
    return torch.from_numpy(np.ascontiguousarray(channels_first))


def check_labels(y: Array, rows: int, name: str) -> Array:
    """Return labels as int64 [rows].

    Args:
        y: Integers from 0, [rows] or [rows, 1].
        rows: Number of examples.
        name: Name of the array in error messages.

    Raises:
        ValueError: `y` has another shape, another type or a negative label.

    """
    if y.shape != (rows,) and y.shape != (rows, 1):
        raise ValueError(f"{name} has shape {y.shape} for {rows} rows, not one label per row")
    if y.dtype.kind not in "ui":
        raise ValueError(f"{name} contains {y.dtype} labels, not integers")
    if y.size and y.min() < 0:
        raise ValueError(f"{name} contains the label {y.min()}, not labels from 0 upwards")
    return y.reshape(rows).astype(np.int64)


def check_classes(train: Array, test: Array, names: tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the names of the classes, by label.

    Raises:
        ValueError: A label has no name; or, without names, more than half of the numbers up to the
            largest label never occur, which is taken for a corrupt file.

    """
    if names is None:
        count, different = int(train.max()) + 1, len(np.unique(train))
        if 2 * different < count:
            raise ValueError(
                f"labels reach {count - 1} though only {different} different ones occur"
            )
        names = tuple(str(label) for label in range(count))
    largest = max(int(train.max()), int(test.max()) if test.size else 0)
    if largest >= len(names):
        raise ValueError(f"the label {largest} is out of range: there are {len(names)} classes")
    return names
