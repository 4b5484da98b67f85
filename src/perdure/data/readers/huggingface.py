"""Hugging Face datasets, by a local path or by name (extra `huggingface`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from perdure.config import DataConfig
from perdure.core.optional import require
from perdure.core.rng import Rng
from perdure.data.readers.image_folder import Opener, pack
from perdure.data.readers.text import class_names, text_source
from perdure.data.source import (
    Array,
    ConfigLocation,
    Examples,
    Source,
    check_classes,
    check_labels,
    stratified,
)

_TEST_SPLITS = ("test", "validation", "valid", "val")
_NONE = np.empty(0, np.int64)


def load_huggingface(config: DataConfig, rng: Rng, place: ConfigLocation) -> Source:
    """A dataset with an image or a text column and a label column."""
    path = config.path or ""
    train, test = _splits(_fetch(path, place), config, rng, place)
    has = train.column_names
    column = config.image_column if config.image_column in has else config.text_column
    for key, name in (("image_column", column), ("label_column", config.label_column)):
        if name not in has:
            raise place.error(
                key, getattr(config, key), f"a column of the dataset: {', '.join(has)}"
            )
    name = Path(path).name
    with _reported(path, place):
        if column == config.image_column:
            return _image_source(name, train, test, config, place)
        rows = [_text_rows(part, config) for part in (train, test)]
        return text_source(name, rows[0], rows[1], _names(train, config), config)


@contextmanager
def _reported(path: str, place: ConfigLocation) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise place.error("path", path, f"a dataset with good rows ({error})") from None


def _fetch(path: str, place: ConfigLocation) -> Any:
    """A Dataset or a DatasetDict; anything that keeps it from being read is the user's to know."""
    datasets = require("datasets", f"{place.key}.source", "huggingface")
    folder = Path(path)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            return datasets.load_from_disk(path)
        return datasets.load_dataset(path)
    except Exception as error:  # the library raises its own, Arrow's and the network's
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise place.error("path", path, f"a dataset's name or local folder ({first})") from None


def _splits(data: Any, config: DataConfig, rng: Rng, place: ConfigLocation) -> tuple[Any, Any]:
    """Training and test part; where there is no test part, a seeded split of the training part."""
    if not isinstance(data, dict):
        return _divided(data, config, rng, place)
    train = data["train"] if "train" in data else data[next(iter(data))]
    test = next((data[name] for name in _TEST_SPLITS if name in data), None)
    if test is None or test is train:
        return _divided(train, config, rng, place)
    return train, test


def _divided(data: Any, config: DataConfig, rng: Rng, place: ConfigLocation) -> tuple[Any, Any]:
    if config.label_column not in data.column_names:
        has = ", ".join(data.column_names)
        raise place.error("label_column", config.label_column, f"a column of the dataset: {has}")
    labels = np.array([str(label) for label in data[config.label_column]])
    generator = rng.numpy_generator("holdout", place.number)
    train, test = stratified(labels, config.test_fraction, generator)
    return data.select(train), data.select(test)


def _image_source(
    name: str, train: Any, test: Any, config: DataConfig, place: ConfigLocation
) -> Source:
    if not len(train) or not len(test):
        raise ValueError(f"{name} has no rows to {'test' if len(train) else 'train'} on")
    labels, test_labels, classes = _labels(train, test, config)
    openers = _openers(train, config.image_column) + _openers(test, config.image_column)
    x = pack(openers, [f"{name}, image {i}" for i in range(len(openers))], config, place)
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


def _names(data: Any, config: DataConfig) -> tuple[str, ...] | None:
    """The names of the classes where the dataset knows them."""
    names = getattr(data.features[config.label_column], "names", None)
    return tuple(names) if names else None


def _labels(train: Any, test: Any, config: DataConfig) -> tuple[Array, Array, tuple[str, ...]]:
    raw, raw_test = (list(part[config.label_column]) for part in (train, test))
    names = _names(train, config)
    if names is None:
        names = class_names([*raw, *raw_test])
        places = {name: place for place, name in enumerate(names)}
        raw, raw_test = ([places[str(label)] for label in part] for part in (raw, raw_test))
    y, y_test = check_labels(np.array(raw), len(raw), config.label_column), np.array(raw_test)
    y_test = check_labels(y_test, len(raw_test), config.label_column)
    return y, y_test, check_classes(y, y_test, names)


def _text_rows(data: Any, config: DataConfig) -> list[dict[str, Any]]:
    """Rows with their label by name, where the dataset has names for its numbers."""
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
