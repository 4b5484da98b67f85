"""Datasets of Hugging Face, by local path or by name (extra `huggingface`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from perdure.config import HuggingfaceData
from perdure.core.errors import UserError
from perdure.core.optional import require
from perdure.core.rng import Rng
from perdure.data.checks import check_classes, check_labels
from perdure.data.clients import with_clients
from perdure.data.readers.image_folder import Opener, decode_images
from perdure.data.readers.text import class_names, text_source
from perdure.data.source import Array, ConfigLocation, Examples, Source
from perdure.data.subsets import stratified_split

_TEST_SPLITS = ("test", "validation", "valid", "val")
_NONE = np.empty(0, np.int64)


def load_huggingface(config: HuggingfaceData, rng: Rng, location: ConfigLocation) -> Source:
    """Load a dataset with an image or text column and a label column."""
    path = config.path
    train, test = _splits(_fetch(config, location), config, rng, location)
    has = train.column_names
    column = config.image_column if config.image_column in has else config.text_column
    for key, name in (("image_column", column), ("label_column", config.label_column)):
        if name not in has:
            raise location.error(
                key, getattr(config, key), f"a column of the dataset: {', '.join(has)}"
            )
    clients = location.client_column
    if clients is not None and clients not in has:
        raise location.client_error(f"a column of the dataset: {', '.join(has)}")
    name = Path(path).name
    with _reported(path, location):
        if column == config.image_column:
            source = _image_source(name, train, test, config, location)
        else:
            rows = [_text_rows(part, config) for part in (train, test)]
            source = text_source(name, rows[0], rows[1], _names(train, config), config)
    if clients is None:
        return source
    of_test = test[clients] if clients in test.column_names else None
    return with_clients(source, _strings(train[clients]), of_test and _strings(of_test))


def _strings(values: Any) -> list[str]:
    return [str(value) for value in values]


@contextmanager
def _reported(path: str, location: ConfigLocation) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise location.error("path", path, f"a dataset with valid rows ({error})") from None


def _fetch(config: HuggingfaceData, location: ConfigLocation) -> Any:
    """Return a Dataset or a DatasetDict; UserError if it cannot be read."""
    path, subset = config.path, config.subset
    datasets = require("datasets", f"{location.key}.source", "huggingface")
    folder = Path(path)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            if subset is None:
                return datasets.load_from_disk(path)
            raise location.error("subset", subset, "null for a folder of save_to_disk")
        return (
            datasets.load_dataset(path) if subset is None else datasets.load_dataset(path, subset)
        )
    except UserError:
        raise
    except Exception as error:  # of datasets, Arrow or the network
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise location.error("path", path, f"a dataset's name or local folder ({first})") from None


def _splits(
    data: Any, config: HuggingfaceData, rng: Rng, location: ConfigLocation
) -> tuple[Any, Any]:
    """Return training and test data; if there is no test split, split with the seed."""
    if not isinstance(data, dict):
        return _divided(data, config, rng, location)
    train = data["train"] if "train" in data else data[next(iter(data))]
    test = next((data[name] for name in _TEST_SPLITS if name in data), None)
    if test is None or test is train:
        return _divided(train, config, rng, location)
    return train, test


def _divided(
    data: Any, config: HuggingfaceData, rng: Rng, location: ConfigLocation
) -> tuple[Any, Any]:
    if config.label_column not in data.column_names:
        has = ", ".join(data.column_names)
        raise location.error("label_column", config.label_column, f"a column of the dataset: {has}")
    labels = np.array([str(label) for label in data[config.label_column]])
    generator = rng.numpy_generator("holdout", location.number)
    train, test = stratified_split(labels, config.test_fraction, generator)
    return data.select(train), data.select(test)


def _image_source(
    name: str, train: Any, test: Any, config: HuggingfaceData, location: ConfigLocation
) -> Source:
    if not len(train) or not len(test):
        raise ValueError(f"{name} has no rows to {'test' if len(train) else 'train'} on")
    labels, test_labels, classes = _labels(train, test, config)
    openers = _openers(train, config.image_column) + _openers(test, config.image_column)
    x = decode_images(
        openers, [f"{name}, image {i}" for i in range(len(openers))], config, location
    )
    cut = len(train)
    return Source(
        name,
        Examples(x[:cut], torch.from_numpy(labels)),
        Examples(x[cut:], torch.from_numpy(test_labels)),
        classes,
    )


def _openers(data: Any, column: str) -> list[Opener]:
    return [_opener(data, row, column) for row in range(len(data))]


def _opener(data: Any, row: int, column: str) -> Opener:
    def opened() -> Image.Image:
        value = data[row][column]
        if isinstance(value, Image.Image):
            return value
        return Image.fromarray(np.asarray(value, dtype=np.uint8))

    return opened


def _names(data: Any, config: HuggingfaceData) -> tuple[str, ...] | None:
    """Return the names of the classes, or None if the dataset has none."""
    names = getattr(data.features[config.label_column], "names", None)
    return tuple(names) if names else None


def _labels(train: Any, test: Any, config: HuggingfaceData) -> tuple[Array, Array, tuple[str, ...]]:
    raw, raw_test = (list(part[config.label_column]) for part in (train, test))
    names = _names(train, config)
    if names is None:
        names = class_names([*raw, *raw_test])
        by_name = {name: label for label, name in enumerate(names)}
        raw, raw_test = ([by_name[str(label)] for label in labels] for labels in (raw, raw_test))
    y, y_test = check_labels(np.array(raw), len(raw), config.label_column), np.array(raw_test)
    y_test = check_labels(y_test, len(raw_test), config.label_column)
    return y, y_test, check_classes(y, y_test, names)


def _text_rows(data: Any, config: HuggingfaceData) -> list[dict[str, Any]]:
    """Return the rows; labels are class names if the dataset has them."""
    names = _names(data, config)
    texts, labels = list(data[config.text_column]), list(data[config.label_column])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the column {config.text_column!r} holds something other than strings")
    if names is not None:
        check_classes(check_labels(np.array(labels), len(labels), "labels"), _NONE, names)
        labels = [names[label] for label in labels]
    return [
        {config.text_column: text, config.label_column: label}
        for text, label in zip(texts, labels, strict=True)
    ]
