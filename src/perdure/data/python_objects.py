"""Python objects as data: arrays, tensors, datasets and frames, and the hash of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from perdure.core.errors import UserError
from perdure.core.registry import object_name
from perdure.core.rng import Rng
from perdure.data.examples import Array, Source, Text
from perdure.data.rows import RawData, RawRows, Reading, rows_domains, rows_source
from perdure.data.source import ConfigLocation, ObjectKeys
from perdure.data.sources.arrays import array_rows
from perdure.data.sources.huggingface import dataset_rows
from perdure.data.sources.image_folder import Opener, decode_images
from perdure.data.sources.table import FrameColumns, table_rows
from perdure.data.sources.text import text_columns

# ---- Map-style datasets of torch, read once from the first example to the last


def torch_rows(train: Any, test: Any, config: ObjectKeys, location: ConfigLocation) -> RawData:
    """Return the rows of a torch Dataset, and of one with test data.

    Raises:
        ValueError: It has no length or no examples, or its examples are no pairs of one shape.

    """
    parts = [
        _part(data, suffix, config, location)
        for data, suffix in ((train, "_train"), (test, "_test"))
        if data is not None
    ]
    return RawData(parts[0], parts[1] if len(parts) > 1 else None, _class_names(train))


def _class_names(data: Any) -> tuple[str, ...] | None:
    """Return the names in the attribute `classes` of a dataset, or of one that it is a part of."""
    while not hasattr(data, "classes") and hasattr(data, "dataset"):
        data = data.dataset
    names = getattr(data, "classes", None)
    is_named = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_named and names else None


def _part(data: Any, suffix: str, config: ObjectKeys, location: ConfigLocation) -> RawRows:
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise ValueError(f"{type(data).__name__} is not a map-style Dataset with a length")
    if not len(data):
        raise ValueError(f"{type(data).__name__} has no examples")
    pairs = [_pair(data[index], index) for index in range(len(data))]
    inputs, labels = zip(*pairs, strict=True)
    y = np.array([label.item() if isinstance(label, Tensor) else label for label in labels])
    return RawRows(_stacked(list(inputs), config, location), y, suffix=suffix)


def _pair(example: Any, index: int) -> tuple[Any, Any]:
    if not isinstance(example, tuple | list) or len(example) < 2:
        kind = type(example).__name__
        raise ValueError(f"example {index} is {kind}, not a pair of an input and a label")
    return example[0], example[1]


def _stacked(
    inputs: list[Any], config: ObjectKeys, location: ConfigLocation
) -> Array | Tensor | list[Any]:
    """Return inputs as one array, as a tensor (channels first), or as texts."""
    first = inputs[0]
    if isinstance(first, str):
        return inputs
    if isinstance(first, Image.Image):
        openers: list[Opener] = [_opener(image) for image in inputs]
        names = [f"image {index}" for index in range(len(inputs))]
        return decode_images(openers, names, config, location)
    shapes = [tuple(np.shape(value)) for value in inputs]
    other = next((index for index, shape in enumerate(shapes) if shape != shapes[0]), None)
    if other is not None:
        raise ValueError(f"example {other} has the shape {shapes[other]}, example 0 {shapes[0]}")
    return torch.stack(inputs) if isinstance(first, Tensor) else np.stack(inputs)


def _opener(image: Image.Image) -> Opener:
    return image.copy


# ---- Python objects as data: arrays, tensors, datasets, frames, and several of them
#
# `as_source` converts an object to a source, `as_sources` one that has several parts or domains.

Parts = dict[str, RawData]
"""Several data sets by name, such as one per task."""
ACCEPTED = (
    "a tuple (x, y), a dict of arrays, a torch Dataset, a Hugging Face Dataset or a pandas "
    "DataFrame; a list or dict of them; or a function of task"
)
DEFAULT_KEYS = ObjectKeys(source="given:object")
_SPLITS = {"train", "test"}
_DATA = ConfigLocation()
_HELD = Rng(0)


def as_source(
    value: Any,
    config: ObjectKeys = DEFAULT_KEYS,
    rng: Rng = _HELD,
    location: ConfigLocation = _DATA,
    name: str = "data",
) -> Source:
    """Return a Python object as a source.

    Raises:
        UserError: The object cannot be read as labeled examples.

    Example:
        >>> source = as_source((np.eye(4), ["cat", "dog", "cat", "dog"]))
        >>> source.class_names, source.shape
        (('cat', 'dog'), (4,))
    """
    rows = read_object(value, config, location)
    with reported(value, location):
        if not isinstance(rows, RawData):
            raise ValueError(f"it has {len(rows)} parts, of which one is used at a time")
        return rows_source(name, rows, reading_of(config, rng, location))


def as_sources(
    value: Any,
    config: ObjectKeys = DEFAULT_KEYS,
    rng: Rng = _HELD,
    location: ConfigLocation = _DATA,
) -> list[Source]:
    """Return one source per part of a list or dict, or per domain of one object.

    The arguments are those of `as_source`; parts of a dict have the names of its keys.
    """
    rows = read_object(value, config, location)
    with reported(value, location):
        return rows_sources(rows, reading_of(config, rng, location))


def rows_sources(rows: RawData | Parts, reading: Reading) -> list[Source]:
    """Return one source per part, or per domain of rows; ValueError if there are neither."""
    if isinstance(rows, RawData):
        return rows_domains(rows, reading)
    return [
        rows_source(name, part, reading.numbered(number))
        for number, (name, part) in enumerate(rows.items())
    ]


def reading_of(config: ObjectKeys, rng: Rng, location: ConfigLocation) -> Reading:
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
    value: Any, config: ObjectKeys = DEFAULT_KEYS, location: ConfigLocation = _DATA
) -> RawData | Parts:
    """Return the rows of an object, or of each part of a list or dict of objects.

    The arguments are those of `as_source`; rows are returned unchanged.
    """
    if isinstance(value, RawData):
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


def _one(value: Any, config: ObjectKeys, location: ConfigLocation) -> RawData:
    if isinstance(value, RawData):
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
            return _train_and_test(value["train"], value["test"], config, location)
        if isinstance(value, Mapping) and _has_arrays(value):
            return array_rows(_arrays(value), location)
        if isinstance(value, tuple) and len(value) == 2:
            if isinstance(value[0], tuple | Dataset):
                return _train_and_test(value[0], value[1], config, location)
            return array_rows(_arrays({"x": value[0], "y": value[1]}), location)
    raise UserError(f"{location.key}: must be {ACCEPTED}, got {type(value).__name__}")


def frame_rows(frame: Any, config: ObjectKeys, location: ConfigLocation) -> RawData:
    """Return the rows of a frame: texts if it has the text columns, else numbers."""
    columns = FrameColumns(frame)
    names, texts = columns.names(), text_columns(config.text_column)
    is_text = config.feature_columns is None and all(name in names for name in texts)
    return table_rows(columns, config, location, texts if is_text else ())


def _train_and_test(train: Any, test: Any, config: ObjectKeys, location: ConfigLocation) -> RawData:
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


# ---- A hash of the content of data that was given in Python, and the data as bytes


def data_kind(value: Any, rows: RawData | Parts) -> str:
    """Return the name of given data in a config: its type, and a hash of its content."""
    return object_name(type(value).__name__, fingerprint(rows))


def fingerprint(rows: RawData | Parts) -> str:
    """Return the SHA-256 of the content of rows, in hexadecimal."""
    content = hashlib.sha256()
    _update(content, rows)
    return content.hexdigest()


def _update(content: Any, value: Any) -> None:
    """Add a value to a hash: what it is, its size, and its content."""
    if isinstance(value, RawData | RawRows):
        for field in fields(value):
            content.update(f"|{field.name}".encode())
            _update(content, getattr(value, field.name))
    elif isinstance(value, dict):
        for name, item in value.items():
            content.update(f"|{name}".encode())
            _update(content, item)
    elif isinstance(value, Tensor | np.ndarray):
        array = value.numpy() if isinstance(value, Tensor) else value
        order = "first" if isinstance(value, Tensor) else "last"  # where the channels are
        content.update(f"|{order}|{array.dtype}|{array.shape}".encode())
        content.update(np.ascontiguousarray(array).tobytes())
    else:
        content.update(f"|{value!r}".encode())


def rows_to_tree(rows: RawData | Parts) -> Any:
    """Return rows as a tree of tensors and plain values, which `core.encoding` can store."""
    if isinstance(rows, dict):
        return {"parts": [[name, rows_to_tree(part)] for name, part in rows.items()]}
    return {field.name: _plain(getattr(rows, field.name)) for field in fields(rows)}


def _plain(value: Any) -> Any:
    if isinstance(value, RawRows):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if not isinstance(value, np.ndarray):
        return value
    return {"strings": value.tolist()} if value.dtype.kind in "US" else {"array": _tensor(value)}


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(value))


def rows_from_tree(tree: Any) -> RawData | Parts:
    """Return the rows that `rows_to_tree` made a tree of, after it was stored."""
    if "parts" in tree:
        parts = {name: rows_from_tree(part) for name, part in tree["parts"]}
        return {name: part for name, part in parts.items() if isinstance(part, RawData)}
    test = None if tree["test"] is None else _part_from_tree(tree["test"])
    classes, features = (_names(tree[name]) for name in ("class_names", "feature_names"))
    return RawData(
        _part_from_tree(tree["train"]), test, classes, tuple(tree["domain_names"]), features
    )


def _names(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _part_from_tree(tree: Any) -> RawRows:
    values = {name: _value(value) for name, value in tree.items()}
    if isinstance(values["x"], list):  # pairs have become lists
        values["x"] = [text if isinstance(text, str) else tuple(text) for text in values["x"]]
    return RawRows(**values)


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return np.array(value["strings"]) if "strings" in value else value["array"].numpy()
