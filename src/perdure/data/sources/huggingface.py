"""Datasets of Hugging Face, by local path or by name (extra `huggingface`)."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from perdure.config import DataConfig
from perdure.config.section import OpenFraction, PositiveInt, Text, TextColumn
from perdure.core.registry import require
from perdure.core.rng import Rng
from perdure.data.examples import Source
from perdure.data.examples import Text as TextRow
from perdure.data.rows import RawData, RawRows, Reading, rows_source
from perdure.data.source import ConfigLocation, ObjectKeys
from perdure.data.sources.image_folder import Opener, decode_images
from perdure.data.sources.text import check_label_types, text_columns, text_of

# ---- Whether a download can work at all: found out in seconds, without the retries of libraries.

_SECONDS = 5.0


@contextmanager
def offline_if_unreachable() -> Iterator[bool]:
    """Let Hugging Face's libraries use their cache alone while their hub does not answer.

    They would try for half a minute otherwise. Data that was downloaded before is still found.
    """
    constants: Any = import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not is_reachable(constants.ENDPOINT)
    try:
        yield not constants.HF_HUB_OFFLINE
    finally:
        constants.HF_HUB_OFFLINE = before


def is_reachable(url: str) -> bool:
    """Return whether a web server answers within seconds, whatever it answers."""
    try:
        request = urllib.request.Request(url, method="HEAD", headers={"User-Agent": "perdure"})
        with urllib.request.urlopen(request, timeout=_SECONDS):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError, HTTPException):
        return False


# ---- Datasets of Hugging Face, by local path or by name (extra `huggingface`)

_TEST_SPLITS = ("test", "validation", "valid", "val")


class HuggingfaceData(DataConfig):
    """A Hugging Face data set of images or texts.

    Example: `data: {source: huggingface, path: cifar100, label_column: fine_label}`
    """

    has_texts: ClassVar[bool] = True

    path: Text
    """Name of a data set on the hub, or a folder that holds a saved one."""
    subset: Text | None = None
    """Name of a part of the data set, such as sst2 of glue. If None, its default part."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if the data set has no test split."""
    image_column: str = "image"
    """Column of the images. If the data set does not have it, `text_column` is read."""
    label_column: str = "label"
    """Column of the labels."""
    text_column: TextColumn = "text"
    """Column of the texts, or the two columns of pairs of texts, such as [question1, question2]."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""

    def load(self, rng: Rng, location: ConfigLocation) -> Source:
        """Load a data set with an image or text column and a label column."""
        data = _fetch(self, location)
        with _reported(self.path, location):
            rows = dataset_rows(data, self, location)
            reading = Reading(rng, location, self.test_fraction, self.features)
            return rows_source(Path(self.path).name, rows, reading)


def dataset_rows(
    data: Any, config: HuggingfaceData | ObjectKeys, location: ConfigLocation
) -> RawData:
    """Return the rows of a `datasets.Dataset` or `DatasetDict`.

    Raises:
        ValueError: A value is invalid.
        UserError: A column is missing.

    """
    train, test = _splits(data)
    column: str | list[str] = config.image_column
    if column not in train.column_names:
        column = config.text_column
    key = "text_column" if "text_column" in config.model_fields_set else "image_column"
    keys = {"label_column": config.label_column, key: column}
    for part in (train,) if test is None else (train, test):
        _check_columns(part.column_names, keys, config, location)
    parts = [
        None if part is None else _part(part, column, config, location) for part in (train, test)
    ]
    if isinstance(column, str) and column == config.image_column:
        parts = _with_images(parts, (train, test), config, location)
    assert parts[0] is not None
    return RawData(parts[0], parts[1], _names(train, config))


def _check_columns(
    has: list[str],
    keys: dict[str, Any],
    config: HuggingfaceData | ObjectKeys,
    location: ConfigLocation,
) -> None:
    for key, names in keys.items():
        if any(name not in has for name in text_columns(names)):
            expected = f"a column of the dataset: {', '.join(has)}"
            raise location.error(key, getattr(config, key), expected)


def _part(
    data: Any, column: Any, config: HuggingfaceData | ObjectKeys, location: ConfigLocation
) -> RawRows:
    """Return the rows of one split; images are left out."""
    labels = list(data[config.label_column])
    if _names(data, config) is None:
        check_label_types(labels)
    clients = location.client_column
    if clients is not None and clients not in data.column_names:
        raise location.client_error(f"a column of the dataset: {', '.join(data.column_names)}")
    of_rows = None if clients is None else np.array(column_strings(data, clients))
    texts: list[TextRow] = []
    if column != config.image_column:
        columns = [list(data[name]) for name in text_columns(column)]
        names = text_columns(column)
        texts = [
            text_of(dict(zip(names, row, strict=True)), column)
            for row in zip(*columns, strict=True)
        ]
    return RawRows(texts, np.array(labels), clients=of_rows)


def _with_images(
    parts: list[RawRows | None],
    data: tuple[Any, Any],
    config: HuggingfaceData | ObjectKeys,
    location: ConfigLocation,
) -> list[RawRows | None]:
    """Return the parts with their images, decoded together: all in one size and mode."""
    openers = [_openers(part, config.image_column) if part is not None else [] for part in data]
    names = [f"image {row}" for of_part in openers for row in range(len(of_part))]
    if not all(openers[: 1 + (data[1] is not None)]):
        raise ValueError("a split has no rows")
    x = decode_images([*openers[0], *openers[1]], names, config, location)
    cut = len(openers[0])
    images = (x[:cut], x[cut:])
    return [p and replace(p, x=pixels) for p, pixels in zip(parts, images, strict=True)]


@contextmanager
def _reported(path: str, location: ConfigLocation) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise location.error("path", path, f"a dataset with valid rows ({error})") from None


def _fetch(config: HuggingfaceData, location: ConfigLocation) -> Any:
    """Return a Dataset or a DatasetDict; UserError if it cannot be read."""
    require("datasets", f"{location.key}.source", "huggingface")
    if config.subset is not None and _is_saved(config.path):
        raise location.error("subset", config.subset, "null for a folder of save_to_disk")
    try:
        return read_dataset(config.path, config.subset)
    except ValueError as error:
        expected = f"a dataset's name or local folder ({error})"
        raise location.error("path", config.path, expected) from None


def _is_saved(path: str) -> bool:
    """Return whether a folder was written by save_to_disk."""
    return any((Path(path) / name).is_file() for name in ("dataset_dict.json", "state.json"))


def read_dataset(path: str, subset: str | None) -> Any:
    """Return a Dataset or a DatasetDict.

    Raises:
        ValueError: It cannot be read, or the hub does not answer.

    """
    datasets = import_module("datasets")
    is_local = Path(path).is_dir()
    with nullcontext(True) if is_local else offline_if_unreachable() as is_reached:
        try:
            if _is_saved(path):
                return datasets.load_from_disk(path)
            return datasets.load_dataset(*(path,) if subset is None else (path, subset))
        except Exception as error:  # of datasets, Arrow or the network
            first = (str(error).splitlines() or [type(error).__name__])[0]
            reason = first if is_reached else "Hugging Face's hub does not answer"
            raise ValueError(reason) from None


def column_strings(data: Any, column: str) -> list[str]:
    """Return a column of a dataset as strings: names of classes where it has them."""
    names = getattr(data.features[column], "names", None)
    return [names[value] if names else str(value) for value in data[column]]


def _splits(data: Any) -> tuple[Any, Any]:
    """Return training and test data; the latter is None if there is no test split."""
    if not isinstance(data, dict):
        return data, None
    train = data["train"] if "train" in data else data[next(iter(data))]
    test = next((data[name] for name in _TEST_SPLITS if name in data), None)
    return train, None if test is train else test


def _openers(data: Any, column: str) -> list[Opener]:
    return [_opener(data, row, column) for row in range(len(data))]


def _opener(data: Any, row: int, column: str) -> Opener:
    def opened() -> Image.Image:
        value = data[row][column]
        if isinstance(value, Image.Image):
            return value
        return Image.fromarray(np.asarray(value, dtype=np.uint8))

    return opened


def _names(data: Any, config: HuggingfaceData | ObjectKeys) -> tuple[str, ...] | None:
    """Return the names of the classes, or None if the dataset has none."""
    names = getattr(data.features[config.label_column], "names", None)
    return tuple(names) if names else None
