"""Sources stored as arrays: the digits of scikit-learn, and npz files."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from perdure.config import DigitsData, NpzData
from perdure.core.rng import Rng
from perdure.data.checks import check_images
from perdure.data.named_arrays import array_rows
from perdure.data.rows import Reading, rows_domains, rows_source
from perdure.data.source import Array, ConfigLocation, Examples, Source
from perdure.data.subsets import stratified_split


def load_digits(config: DigitsData, rng: Rng, location: ConfigLocation) -> Source:
    """Load the 1,797 digits of 8x8 pixels of scikit-learn, scaled to 0..255."""
    images, labels = _bundled_digits()
    x = np.rint(images * (255 / 16)).astype(np.uint8)
    generator = rng.numpy_generator("holdout", location.number)
    train, test = stratified_split(labels, config.test_fraction, generator)
    rows = Examples(check_images(x, "digits"), torch.from_numpy(labels))
    return Source("digits", rows.select(train), rows.select(test), tuple("0123456789"))


def _bundled_digits() -> tuple[Array, Array]:
    """Return images and labels from the file; importing scikit-learn would take two seconds."""
    package = find_spec("sklearn")
    folder = Path(getattr(package, "origin", None) or "").parent / "datasets" / "data"
    with gzip.open(folder / "digits.csv.gz", "rt", encoding="ascii") as text:
        rows = np.loadtxt(text, delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


def load_npz(config: NpzData, rng: Rng, location: ConfigLocation) -> Source:
    """Load an npz file with x_train, y_train, x_test and y_test, or with x, y and more."""
    path = _file(config, location)
    try:
        rows = array_rows(_read(path), location)
        return rows_source(path.stem, rows, _reading(config, rng, location))
    except ValueError as error:
        raise location.error("path", path, f"a valid npz file ({error})") from None


def load_npz_domains(config: NpzData, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load one source per domain of an npz file with x, y and domain."""
    path = _file(config, location)
    try:
        return rows_domains(array_rows(_read(path), location), _reading(config, rng, location))
    except ValueError as error:
        raise location.error("path", path, f"an npz file with domains ({error})") from None


def _reading(config: NpzData, rng: Rng, location: ConfigLocation) -> Reading:
    return Reading(rng, location, config.test_fraction)


def _file(config: NpzData, location: ConfigLocation) -> Path:
    path = Path(config.path)
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
