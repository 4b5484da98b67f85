"""The official files of data sets, one reader per format."""

from __future__ import annotations

import bz2
import csv
import io
import json
import math
import pickle
import re
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perdure.data.examples import Array
from perdure.data.named.sets import DataSet
from perdure.data.source import ConfigLocation
from perdure.data.sources.arrays import find_idx, read_idx
from perdure.data.sources.image_folder import FolderData, decode_files

# ---- CIFAR's files: the binary version, and the Python version, whose pickles run no code here.

_PIXELS = 3 * 32 * 32
_LARGEST = 1 << 30
"""Bytes of a file in an archive; those of CIFAR have less than a fifth."""


@dataclass(frozen=True)
class _Layout:
    """The files of one version of a set."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    labels: str
    """Key of the labels in a pickle."""
    label_bytes: int
    """Bytes before the pixels of a binary record; the last is the label."""


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_BINARY = {
    "cifar-10-": _Layout(
        tuple(f"{name}.bin" for name in _BATCHES), ("test_batch.bin",), "batches.meta.txt", "", 1
    ),
    "cifar-100-": _Layout(("train.bin",), ("test.bin",), "fine_label_names.txt", "", 2),
}
_PYTHON = {
    "cifar-10-": _Layout(_BATCHES, ("test_batch",), "batches.meta", "labels", 0),
    "cifar-100-": _Layout(("train",), ("test",), "meta", "fine_labels", 0),
}


def read_cifar(folder: Path, data_set: DataSet) -> dict[str, Array]:
    """Return x_train, y_train, x_test, y_test and, if they are there, class_names.

    Raises:
        ValueError: A file is missing, damaged or something else.

    """
    prefix = data_set.official.prefix
    for version, layouts in (("binary", _BINARY), ("python", _PYTHON)):
        files = _files(folder, f"{prefix}{version}.tar.gz", layouts[prefix])
        if files:
            return _arrays(files, layouts[prefix])
    raise ValueError(f"there is no {prefix}binary.tar.gz and no {prefix}python.tar.gz")


def _files(folder: Path, archive: str, layout: _Layout) -> dict[str, bytes]:
    """Return the contents of the files of a version by name; empty if it is not there."""
    wanted = (*layout.train, *layout.test, layout.names)
    if (folder / archive).is_file():
        files = _unpacked(folder / archive, set(wanted))
    elif (folder / layout.train[0]).is_file():
        files = {n: (folder / n).read_bytes() for n in wanted if (folder / n).is_file()}
    else:
        return {}
    missing = [name for name in (*layout.train, *layout.test) if name not in files]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    return files


def _unpacked(path: Path, wanted: set[str]) -> dict[str, bytes]:
    """Return files of an archive by their last name; nothing is written to disk."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if member.isfile() and name in wanted and name not in files:
                    files[name] = _content(archive, member)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    return files


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    if file is None or member.size > _LARGEST:
        raise ValueError(f"{member.name} has {member.size:,} bytes")
    data = file.read()
    if len(data) != member.size:
        raise ValueError(f"{member.name} is truncated")
    return data


def _arrays(files: dict[str, bytes], layout: _Layout) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for part, names in (("train", layout.train), ("test", layout.test)):
        batches = [_batch(name, files[name], layout) for name in names]
        arrays[f"x_{part}"] = _images(np.concatenate([x for x, _ in batches]))
        arrays[f"y_{part}"] = np.concatenate([y for _, y in batches])
    classes = _names(files, layout)
    return arrays | ({"class_names": np.array(classes)} if classes else {})


def _images(pixels: Array) -> Array:
    """Return [N, 3072], channel by channel, as images [N, 32, 32, 3]."""
    return np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _batch(name: str, data: bytes, layout: _Layout) -> tuple[Array, Array]:
    """Return pixels, uint8 [N, 3072], and labels, int64 [N]."""
    if layout.labels:
        return _pickled_batch(name, read_pickle(name, data), layout.labels.encode())
    size = layout.label_bytes + _PIXELS
    if not data or len(data) % size:
        raise ValueError(f"{name} has {len(data):,} bytes, not a multiple of {size:,}: truncated")
    records = np.frombuffer(data, np.uint8).reshape(-1, size)
    return records[:, layout.label_bytes :], records[:, layout.label_bytes - 1].astype(np.int64)


def _pickled_batch(name: str, values: dict[bytes, Any], key: bytes) -> tuple[Array, Array]:
    pixels, labels = values.get(b"data"), values.get(key)
    if not isinstance(pixels, np.ndarray) or pixels.shape[1:] != (_PIXELS,):
        raise ValueError(f"{name} has no array of {_PIXELS:,} bytes per image")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise ValueError(f"{name} has no list of labels")
    return pixels, np.array(labels, np.int64)


def _names(files: dict[str, bytes], layout: _Layout) -> list[str]:
    """Return the names of the classes; empty if their file is not there."""
    data = files.get(layout.names)
    if data is None:
        return []
    if not layout.labels:
        return data.decode("utf-8", "replace").split()
    names = read_pickle(layout.names, data).get(layout.labels[:-1].encode() + b"_names", [])
    return [name.decode("utf-8", "replace") for name in names if isinstance(name, bytes)]


def read_pickle(name: str, data: bytes) -> dict[bytes, Any]:
    """Return the dictionary in a pickle that holds plain values and arrays of bytes.

    Nothing that the pickle names is imported: NumPy's names become a class without any effect, and
    all others are refused. The reader is that of Python's library in Python, since the faster one
    allocates memory as a pickle says.

    Raises:
        ValueError: It is damaged, or holds anything else.

    """
    try:
        values = _PlainUnpickler(io.BytesIO(data), encoding="bytes").load()
        if type(values) is not dict:
            raise ValueError("it holds no dictionary")
        return {key: _plain(value) for key, value in values.items()}
    except Exception as error:
        detail = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"{name} is not a pickle of plain values: {detail}") from None


class _StandIn:
    """What a pickle makes instead of an array or its type."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _PlainUnpickler(pickle._Unpickler):
    """Unpickles plain values; arrays become stand-ins, which `_plain` turns into arrays."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a name of NumPy, and refuse all other names."""
        known = ("numpy.ndarray", "numpy.dtype", "numpy.core.multiarray._reconstruct",
                 "numpy._core.multiarray._reconstruct")  # fmt: skip
        if f"{module}.{name}" not in known:
            raise ValueError(f"it names {module}.{name}, which is code")
        return _StandIn


def _plain(value: Any) -> Any:
    """Return a value of the dictionary, an array of bytes instead of its stand-in."""
    if not isinstance(value, _StandIn):
        return value
    _, shape, dtype, is_fortran, raw = value.state
    if dtype.args[0] not in ("u1", b"u1") or is_fortran or type(raw) is not bytes:
        raise ValueError("it holds an array of something other than bytes, row by row")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("it holds an array without a shape")
    if math.prod(shape) != len(raw):
        raise ValueError(f"it holds {len(raw):,} bytes for an array of shape {shape}")
    return np.frombuffer(raw, np.uint8).reshape(shape)


# ---- Official files of texts, as rows with the fields of JSON lines

TextRows = list[dict[str, str]]
"""Texts: `text`, `label` and `split` or `domain`."""
_REVIEW = re.compile(r"<review_text>\s*(.*?)\s*</review_text>", re.DOTALL)
_CLINC_SPLITS = ("train", "val", "test")


def read_clinc(folder: Path, _: DataSet) -> TextRows:
    """Return the rows of data_full.json: lists of a text and its intent, by split."""
    path = folder / "data_full.json"
    try:
        splits = json.loads(path.read_text(encoding="utf-8"))
        return [
            {"text": str(text), "label": str(label), "split": split}
            for split in _CLINC_SPLITS
            for text, label in splits[split]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"data_full.json is damaged: {error!r}") from None


def read_banking(folder: Path, _: DataSet) -> TextRows:
    """Return the rows of train.csv and test.csv, with the columns text and category."""
    rows: TextRows = []
    for split in ("train", "test"):
        path = folder / f"{split}.csv"
        if not path.is_file():
            raise ValueError(f"{path.name} is missing")
        try:
            with path.open(encoding="utf-8", newline="") as file:
                read = list(csv.DictReader(file, strict=True))
            rows += [{"text": r["text"], "label": r["category"], "split": split} for r in read]
        except (OSError, ValueError, csv.Error, KeyError) as error:
            raise ValueError(f"{path.name} has no columns text and category: {error}") from None
        if not read or any(None in (row["text"], row["category"]) for row in read):
            raise ValueError(f"{path.name} is truncated")
    return rows


def read_amazon(folder: Path, _: DataSet) -> TextRows:
    """Return the rows of DOMAIN/positive.review and DOMAIN/negative.review."""
    rows: TextRows = []
    for path in sorted(folder.glob("*/positive.review")):
        for label in ("negative", "positive"):
            file = path.with_name(f"{label}.review")
            if not file.is_file():
                raise ValueError(f"{path.parent.name}/{file.name} is missing")
            texts = _REVIEW.findall(file.read_text(encoding="latin-1"))
            if not texts:
                raise ValueError(f"{path.parent.name}/{file.name} holds no reviews")
            rows += [{"domain": path.parent.name, "text": t, "label": label} for t in texts]
    return rows


# ---- The official files of data sets, one reader per format

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


def read_official(folder: Path, data_set: DataSet) -> Arrays | TextRows:
    """Return the contents of official files: arrays of images, or rows of texts.

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


Reader = Callable[[Path, DataSet], Arrays | TextRows]
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
