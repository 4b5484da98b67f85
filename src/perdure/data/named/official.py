"""The official files of data sets, one reader per format."""

from __future__ import annotations

import bz2
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from perdure.config import DataSet, FolderData
from perdure.data.named.cifar import read_cifar
from perdure.data.named.texts import Rows, read_amazon, read_banking, read_clinc
from perdure.data.readers.idx import find_idx, read_idx
from perdure.data.readers.image_folder import decode_files
from perdure.data.source import Array, ConfigLocation

Arrays = dict[str, Array]
"""The arrays of an npz file, by name."""
_SPLITS = {"train": "train", "t10k": "test"}


def find_official(folder: Path, data_set: DataSet) -> Path | None:
    """Return the folder with official files: this one, or one of `official.folders` in it."""
    official = data_set.official
    for candidate in (folder, *(folder / name for name in official.folders)):
        if any(path.is_file() for mark in official.marks for path in candidate.glob(mark)):
            return candidate
    return None


def read_official(folder: Path, data_set: DataSet) -> Arrays | Rows:
    """Return the contents of official files: arrays of images, or rows of texts.

    Args:
        folder: As for `find_official`.
        data_set: The data set.

    Raises:
        ValueError: They are missing, damaged or others.
    """
    found = find_official(folder, data_set)
    if found is None:
        raise ValueError("they are not there")
    content = READERS[data_set.official.format](found, data_set)
    if isinstance(content, list):
        return content
    first = data_set.official.first_label
    arrays = {key: a - first if key[:2] == "y_" else a for key, a in content.items()}
    return with_classes(arrays, data_set.classes)


def with_classes(arrays: Arrays, classes: tuple[str, ...] | None) -> Arrays:
    """Return the arrays with these names of the classes; None leaves those that they have."""
    return arrays if classes is None else arrays | {"class_names": np.array(classes)}


def read_mnist(folder: Path, data_set: DataSet) -> Arrays:
    """Return the arrays of four idx files, whose names begin with the prefix of the set."""
    files, arrays = find_idx(folder, data_set.official.prefix), {}
    for split, part in _SPLITS.items():
        for content, key in (("images", "x"), ("labels", "y")):
            if (split, content) not in files:
                raise ValueError(f"{split}-{content} is missing")
            array = read_idx(files[split, content])
            is_turned = key == "x" and data_set.official.transposed
            arrays[f"{key}_{part}"] = array.swapaxes(1, 2) if is_turned else array
    return {key: a.astype(np.int64) if key[0] == "y" else a for key, a in arrays.items()}


def read_svhn(folder: Path, _: DataSet) -> Arrays:
    """Return the arrays of train_32x32.mat and test_32x32.mat; the label 10 stands for 0."""
    arrays = {}
    for part in ("train", "test"):
        file = _matlab(folder, f"{part}_32x32.mat")
        arrays[f"x_{part}"] = np.ascontiguousarray(file["X"].transpose(3, 0, 1, 2))
        arrays[f"y_{part}"] = file["y"].astype(np.int64).reshape(-1) % 10
    return arrays


def _matlab(folder: Path, name: str) -> dict[str, Any]:
    from scipy.io import loadmat

    try:
        values: dict[str, Any] = loadmat(folder / name, variable_names=("X", "y"))
    except Exception as error:  # scipy raises many kinds for damaged files
        raise ValueError(f"{name} cannot be read: {error}") from None
    pixels, labels = (np.asarray(values.get(key, 0)) for key in ("X", "y"))
    if pixels.ndim != 4 or pixels.dtype != np.uint8 or labels.size != pixels.shape[-1]:
        raise ValueError(f"{name} does not hold images X and labels y")
    return values


def read_usps(folder: Path, _: DataSet) -> Arrays:
    """Return the arrays of usps.bz2 and usps.t.bz2: a label and 256 values in a line."""
    arrays: Arrays = {}
    for part, name in (("train", "usps.bz2"), ("test", "usps.t.bz2")):
        try:
            lines = bz2.decompress((folder / name).read_bytes()).decode("ascii").splitlines()
            rows = [[float(word.rpartition(":")[2]) for word in line.split()] for line in lines]
            values = np.array(rows)
        except (OSError, EOFError, ValueError) as error:
            raise ValueError(f"{name} cannot be read: {error}") from None
        if values.ndim != 2 or values.shape[1] != 257:
            raise ValueError(f"{name} does not have 256 values per line")
        arrays[f"x_{part}"] = ((values[:, 1:] + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
        arrays[f"y_{part}"] = values[:, 0].astype(np.int64) - 1
    return arrays


def read_listed(folder: Path, data_set: DataSet) -> Arrays:
    """Return images of the folders PREFIXtrain and PREFIXtest, listed in their _labels.txt."""
    arrays: Arrays = {}
    for part in ("train", "test"):
        images = folder / f"{data_set.official.prefix}{part}"
        labels = images.with_name(f"{images.name}_labels.txt")
        if not labels.is_file():
            raise ValueError(f"{labels.name} is missing")
        rows = [line.split() for line in labels.read_text(encoding="utf-8").splitlines() if line]
        if not rows or any(len(r) != 2 or "/" in r[0] or not r[1].isdigit() for r in rows):
            raise ValueError(f"{labels.name} does not have a file and a label per line")
        files = [images / row[0] for row in rows]
        x = decode_files(files, FolderData(path=str(folder)), ConfigLocation())
        arrays[f"x_{part}"] = x.permute(0, 2, 3, 1).numpy()
        arrays[f"y_{part}"] = np.array([int(row[1]) for row in rows])
    return arrays


Reader = Callable[[Path, DataSet], Arrays | Rows]
READERS: dict[str, Reader] = {
    "idx": read_mnist,
    "cifar": read_cifar,
    "svhn": read_svhn,
    "usps": read_usps,
    "listed": read_listed,
    "clinc": read_clinc,
    "banking": read_banking,
    "amazon": read_amazon,
}
"""Readers by format. Folders of classes and of domains have those of `data.source: folder`."""
