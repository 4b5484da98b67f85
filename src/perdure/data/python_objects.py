"""Python objects as data: arrays, tensors, datasets, frames, and several of them.

`as_source` converts an object to a source, `as_sources` one that has several parts or domains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from perdure.config import CustomData
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.named_arrays import array_rows
from perdure.data.readers.frame import frame_rows
from perdure.data.readers.huggingface import dataset_rows
from perdure.data.readers.torch_dataset import torch_rows
from perdure.data.rows import Reading, Rows, rows_domains, rows_source
from perdure.data.source import Array, ConfigLocation, Source, Text

Parts = dict[str, Rows]
"""Several data sets by name, such as one per task."""
ACCEPTED = (
    "a tuple (x, y), a dict of arrays, a torch Dataset, a Hugging Face Dataset or a pandas "
    "DataFrame; a list or dict of them; or a function of task"
)
DEFAULT_KEYS = CustomData(source="given:object")
_SPLITS = {"train", "test"}
_DATA = ConfigLocation()
_HELD = Rng(0)


def as_source(
    value: Any,
    config: CustomData = DEFAULT_KEYS,
    rng: Rng = _HELD,
    location: ConfigLocation = _DATA,
    name: str = "data",
) -> Source:
    """Return a Python object as a source.

    Args:
        value: Inputs and labels as a tuple (x, y) of arrays, tensors or lists, or a pair of such
            tuples, training and test; a dict with x_train, y_train, x_test and y_test, or with x
            and y; a map-style torch Dataset, or a pair of them; a Hugging Face Dataset or
            DatasetDict; a pandas DataFrame. Images in arrays have their channels last, those in
            tensors first.
        config: Names of columns, and the fraction that is held out if there are no test rows.
        rng: Derives the draw of these rows.
        location: The position of the source in the config.
        name: Name of the source.

    Raises:
        UserError: The object cannot be read as labeled examples.

    Example:
        >>> source = as_source((np.eye(4), ["cat", "dog", "cat", "dog"]))
        >>> source.class_names, source.shape
        (('cat', 'dog'), (4,))
    """
    rows = read_object(value, config, location)
    with reported(value, location):
        if not isinstance(rows, Rows):
            raise ValueError(f"it has {len(rows)} parts, of which one is used at a time")
        return rows_source(name, rows, reading_of(config, rng, location))


def as_sources(
    value: Any,
    config: CustomData = DEFAULT_KEYS,
    rng: Rng = _HELD,
    location: ConfigLocation = _DATA,
) -> list[Source]:
    """Return one source per part of a list or dict, or per domain of one object.

    The arguments are those of `as_source`; parts of a dict have the names of its keys.
    """
    rows = read_object(value, config, location)
    with reported(value, location):
        return rows_sources(rows, reading_of(config, rng, location))


def rows_sources(rows: Rows | Parts, reading: Reading) -> list[Source]:
    """Return one source per part, or per domain of rows; ValueError if there are neither."""
    if isinstance(rows, Rows):
        return rows_domains(rows, reading)
    return [
        rows_source(name, part, reading.numbered(number))
        for number, (name, part) in enumerate(rows.items())
    ]


def reading_of(config: CustomData, rng: Rng, location: ConfigLocation) -> Reading:
    """Return how rows become sources."""
    return Reading(rng, location, config.test_fraction, config.features)


@contextmanager
def reported(value: Any, location: ConfigLocation) -> Iterator[None]:
    """Turn a ValueError about an object into the error for a user."""
    try:
        yield
    except ValueError as error:
        raise UserError(
            f"{location.key}: must be valid examples ({error}), got {type(value).__name__}"
        ) from None


def read_object(
    value: Any, config: CustomData = DEFAULT_KEYS, location: ConfigLocation = _DATA
) -> Rows | Parts:
    """Return the rows of an object, or of each part of a list or dict of objects.

    The arguments are those of `as_source`; rows are returned unchanged.
    """
    if isinstance(value, Rows):
        return value
    if not is_parts(value):
        return _one(value, config, location)
    parts = value if isinstance(value, Mapping) else _named(value)
    if not parts:
        raise UserError(f"{location.key}: must be {ACCEPTED}, got an empty {type(value).__name__}")
    return {
        str(name): _one(part, config, replace(location, key=f"{location.key}[{name!r}]"))
        for name, part in parts.items()
    }


def is_parts(value: Any) -> bool:
    """Return whether an object holds several data sets: a list, or a dict that names them."""
    if isinstance(value, Mapping):
        return not (_is_of(value, "datasets") or _has_arrays(value) or set(value) == _SPLITS)
    return isinstance(value, list)


def _named(parts: list[Any]) -> dict[str, Any]:
    return {f"task {number}": part for number, part in enumerate(parts, 1)}


def _one(value: Any, config: CustomData, location: ConfigLocation) -> Rows:
    if isinstance(value, Rows):
        return value
    with reported(value, location):
        if _is_of(value, "datasets"):
            return dataset_rows(value, config, location)
        if _is_of(value, "pandas") and hasattr(value, "columns"):
            return frame_rows(value, config, location)
        if isinstance(value, DataLoader | IterableDataset):
            raise ValueError("it is read from beginning to end; use a map-style Dataset")
        if isinstance(value, Dataset):
            return torch_rows(value, None, config, location)
        if isinstance(value, Mapping) and set(value) == _SPLITS:
            return _pair(value["train"], value["test"], config, location)
        if isinstance(value, Mapping) and _has_arrays(value):
            return array_rows(_arrays(value), location)
        if isinstance(value, tuple) and len(value) == 2:
            if isinstance(value[0], tuple | Dataset):
                return _pair(value[0], value[1], config, location)
            return array_rows(_arrays({"x": value[0], "y": value[1]}), location)
    raise UserError(f"{location.key}: must be {ACCEPTED}, got {type(value).__name__}")


def _pair(train: Any, test: Any, config: CustomData, location: ConfigLocation) -> Rows:
    """Return the rows of training and test data of one kind."""
    if isinstance(train, Dataset) and isinstance(test, Dataset):
        return torch_rows(train, test, config, location)
    if not all(isinstance(part, tuple) and len(part) == 2 for part in (train, test)):
        raise ValueError("training and test data are neither two Datasets nor two tuples (x, y)")
    names = ("x_train", "y_train", "x_test", "y_test")
    return array_rows(_arrays(dict(zip(names, (*train, *test), strict=True))), location)


def _has_arrays(value: Mapping[Any, Any]) -> bool:
    return "x" in value or "x_train" in value


def _is_of(value: Any, package: str) -> bool:
    return any(cls.__module__.partition(".")[0] == package for cls in type(value).__mro__)


def _arrays(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays and tensors by name; texts, under x, stay lists."""
    return {
        name: _inputs(value) if name.startswith("x") else _array(value)
        for name, value in named.items()
    }


def _inputs(value: Any) -> Any:
    """Return inputs as an array, a tensor, or a list of texts or pairs of texts."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, list | tuple) and len(value) and isinstance(value[0], str | tuple):
        return [_text(text) for text in value]
    array = _array(value)
    return array.tolist() if array.dtype.kind == "U" and array.ndim == 1 else array


def _array(value: Any) -> Array:
    if isinstance(value, list | tuple) and len(value) and isinstance(value[0], Tensor):
        value = [item.detach().cpu().numpy() for item in value]
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    array: Array = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
    if array.dtype == object and all(isinstance(item, str) for item in array.flat):
        array = array.astype(str)
    return array.astype(np.int64) if array.dtype == bool else array


def _text(value: Any) -> Text:
    if isinstance(value, str):
        return value
    if len(value) != 2 or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{value!r} is not a text or a pair of texts")
    return value[0], value[1]
