"""Sources stored as arrays: the digits of scikit-learn, npz files, and the idx files of MNIST."""

from __future__ import annotations

import gzip
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from perdure.config import DataConfig
from perdure.config.section import OpenFraction, Text
from perdure.core.rng import Rng
from perdure.data.examples import Array, Examples, Source
from perdure.data.rows import RawData, RawRows, Reading, rows_domains, rows_source, stratified_split
from perdure.data.source import ConfigLocation, check_classes, check_images, check_labels

# ---- Named arrays as labeled rows: the layout of npz files and of dicts in Python

_TRAIN, _TEST = ("x_train", "y_train"), ("x_test", "y_test")


def array_rows(arrays: Mapping[str, Any], location: ConfigLocation) -> RawData:
    """Return the rows of arrays: x and y with domain and is_test, or x_train and y_train.

    Raises:
        ValueError: An array is missing or does not fit the others.
        UserError: The array of the clients is missing.

    """
    names = _names(arrays, "class_names", "fine_names")
    if "x" in arrays:
        return _with_columns(arrays, location, names)
    _require(arrays, _TRAIN)
    clients = _clients(arrays, _count(arrays, "x_train"), location)
    train = RawRows(arrays["x_train"], arrays["y_train"], clients=clients, suffix="_train")
    test = None
    if any(name in arrays for name in _TEST):
        _require(arrays, _TEST)
        _count(arrays, "x_test")
        test = RawRows(arrays["x_test"], arrays["y_test"], suffix="_test")
    return RawData(train, test, names)


def _with_columns(
    arrays: Mapping[str, Any], location: ConfigLocation, names: tuple[str, ...] | None
) -> RawData:
    _require(arrays, ("x", "y"))
    count = _count(arrays, "x")
    domain, domain_names = _domains(arrays, count)
    rows = RawRows(arrays["x"], arrays["y"], domain, _clients(arrays, count, location))
    if "is_test" not in arrays:
        return RawData(rows, None, names, domain_names)
    is_test = _one_per_row(np.asarray(arrays["is_test"]), count, "is_test").astype(bool)
    if rows.y.shape not in ((count,), (count, 1)):
        raise ValueError(f"y has shape {rows.y.shape} for {count} rows, not one label per row")
    rows = rows.checked()
    train, test = (rows.select(np.flatnonzero(part)) for part in (~is_test, is_test))
    return RawData(train, test, names, domain_names)


def _count(arrays: Mapping[str, Any], name: str) -> int:
    if not np.shape(arrays[name]):
        raise ValueError(f"{name} has shape (), not one row per example")
    return len(arrays[name])


def _domains(arrays: Mapping[str, Any], count: int) -> tuple[Array | None, tuple[str, ...]]:
    """Return the name of the domain of each row, and all names in their order."""
    if "domain" not in arrays:
        return None, ()
    domain = np.asarray(arrays["domain"])
    if domain.dtype.kind in "US":
        domain = _one_per_row(domain, count, "domain").astype(str)
        return domain, tuple(np.unique(domain).tolist())
    numbers = check_labels(domain, count, "domain")
    names = _names(arrays, "domain_names")
    names = names or tuple(str(number) for number in range(int(numbers.max()) + 1))
    if numbers.max() >= len(names):
        raise ValueError(f"domain {numbers.max()} is out of range: there are {len(names)} names")
    return np.array(names)[numbers], names


def _require(arrays: Mapping[str, Any], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"{', '.join(missing)} not found among {', '.join(arrays) or 'no arrays'}")


def _names(arrays: Mapping[str, Any], *keys: str) -> tuple[str, ...] | None:
    value = next((arrays[key] for key in keys if arrays.get(key) is not None), None)
    names = None if value is None else np.asarray(value)
    if names is not None and names.ndim != 1:
        raise ValueError(f"{keys[0]} has shape {names.shape}, not one dimension")
    return None if names is None else tuple(str(name) for name in names)


def _clients(arrays: Mapping[str, Any], count: int, location: ConfigLocation) -> Array | None:
    """Return the names of the clients of the rows, or None if no array names them."""
    name = location.client_column
    if name is None:
        return None
    if name not in arrays:
        raise location.client_error(f"an array of the data: {', '.join(arrays)}")
    return _one_per_row(np.asarray(arrays[name]).astype(str), count, name)


def _one_per_row(values: Array, count: int, name: str) -> Array:
    if values.shape != (count,):
        raise ValueError(f"{name} has shape {values.shape} for {count} rows, not one per row")
    return values


# ---- The file format of MNIST: idx files, gzipped or not

_UNSIGNED_BYTE = 0x08
_NAME = re.compile(r"((?:.*-)?)(train|t10k|test)-(images|labels)[-.]idx\d-ubyte(?:\.gz)?")


class IdxData(DataConfig):
    """The four idx files of MNIST and of data sets in its format.

    Example: `data: {source: idx, path: data/mnist}`
    """

    path: Text
    """The folder with the four files."""

    def load(self, rng: Rng, location: ConfigLocation) -> Source:
        """Load train-images-idx3-ubyte, train-labels-idx1-ubyte and those of t10k."""
        folder = Path(self.path)
        if not folder.is_dir():
            raise location.error("path", folder, "a folder with idx files that exists")
        files = find_idx(folder)
        for split in ("train", "t10k"):
            for content, dimensions in (("images", 3), ("labels", 1)):
                if (split, content) not in files:
                    name = f"{split}-{content}-idx{dimensions}-ubyte"
                    raise location.error("path", folder, f"a folder with {name}")
        try:
            return _source(folder.name, {key: read_idx(path) for key, path in files.items()})
        except ValueError as error:
            raise location.error(
                "path", folder, f"a folder with valid idx files ({error})"
            ) from None


def find_idx(folder: Path, prefix: str | None = None) -> dict[tuple[str, str], Path]:
    """Return idx files by split (train or t10k) and content (images or labels)."""
    files: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.iterdir(), key=lambda p: (len(p.name), p.name)):
        match = _NAME.fullmatch(path.name)
        if match and path.is_file() and prefix in (None, match[1]):
            split = "train" if match[2] == "train" else "t10k"
            files.setdefault((split, match[3]), path)
    return files


def _source(name: str, arrays: dict[tuple[str, str], Array]) -> Source:
    x, x_test = arrays["train", "images"], arrays["t10k", "images"]
    if x.shape[1:] != x_test.shape[1:]:
        raise ValueError(f"training images of {x.shape[1:]}, test images of {x_test.shape[1:]}")
    images, test_images = check_images(x, "train-images"), check_images(x_test, "t10k-images")
    y = check_labels(arrays["train", "labels"], len(x), "train-labels")
    y_test = check_labels(arrays["t10k", "labels"], len(x_test), "t10k-labels")
    classes = check_classes(y, y_test, None)
    train = Examples(images, torch.from_numpy(y))
    return Source(name, train, Examples(test_images, torch.from_numpy(y_test)), classes)


def read_idx(path: Path) -> Array:
    """Return the array in an idx file of unsigned bytes; ValueError if it is not one."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] != _UNSIGNED_BYTE:
        raise ValueError(f"{path.name} does not begin like an idx file of unsigned bytes")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise ValueError(f"{path.name} ends within its header")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise ValueError(f"{path.name} has {len(data) - start} bytes for shape {shape}")
    # a copy, since an array over bytes cannot be written to, which torch warns about
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()


# ---- Sources stored as arrays: the digits of scikit-learn, and npz files


class DigitsData(DataConfig):
    """The 1,797 handwritten digits of 8x8 pixels that scikit-learn installs.

    Example: `data: {source: digits}`
    """

    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing."""

    def load(self, rng: Rng, location: ConfigLocation) -> Source:
        """Load the images, scaled to 0..255."""
        images, labels = _bundled_digits()
        x = np.rint(images * (255 / 16)).astype(np.uint8)
        generator = rng.numpy_generator("holdout", location.number)
        train, test = stratified_split(labels, self.test_fraction, generator)
        rows = Examples(check_images(x, "digits"), torch.from_numpy(labels))
        return Source("digits", rows.select(train), rows.select(test), tuple("0123456789"))


def _bundled_digits() -> tuple[Array, Array]:
    """Return images and labels from the file; importing scikit-learn would take two seconds."""
    package = find_spec("sklearn")
    folder = Path(getattr(package, "origin", None) or "").parent / "datasets" / "data"
    with gzip.open(folder / "digits.csv.gz", "rt", encoding="ascii") as text:
        rows = np.loadtxt(text, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


class NpzData(DataConfig):
    """A NumPy file with x_train, y_train, x_test, y_test, or with x, y and more.

    Example: `data: {source: npz, path: mnist.npz}`
    """

    has_numbers: ClassVar[bool] = True

    path: Text
    """The .npz file."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if the file has no test rows."""

    def load(self, rng: Rng, location: ConfigLocation) -> Source:
        """Load x_train, y_train, x_test and y_test, or x, y and more."""
        path = self._file(location)
        try:
            rows = array_rows(_read(path), location)
            return rows_source(path.stem, rows, Reading(rng, location, self.test_fraction))
        except ValueError as error:
            raise location.error("path", path, f"a valid npz file ({error})") from None

    def load_domains(self, rng: Rng, location: ConfigLocation) -> list[Source]:
        """Load one source per domain of x, y and domain."""
        path = self._file(location)
        try:
            rows = array_rows(_read(path), location)
            return rows_domains(rows, Reading(rng, location, self.test_fraction))
        except ValueError as error:
            raise location.error("path", path, f"an npz file with domains ({error})") from None

    def _file(self, location: ConfigLocation) -> Path:
        path = Path(self.path)
        if not path.is_file():
            raise location.error("path", path, "an npz file that exists")
        return path


def _read(path: Path) -> dict[str, Array]:
    """Return all arrays of the file; ValueError if it is corrupt."""
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("it contains a single array")
        with file:
            return {name: file[name] for name in file.files}
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"it cannot be read: {error}") from None
    except ValueError as error:
        if "pickle" in str(error):  # numpy advises to allow pickles
            raise ValueError(
                "it contains something other than arrays of numbers or names"
            ) from None
        raise
