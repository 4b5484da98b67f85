"""Sources stored as arrays: the digits of scikit-learn, and npz files."""

from __future__ import annotations

import gzip
import zipfile
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perdure.config import DigitsData, NpzData
from perdure.core.rng import Rng
from perdure.data.checks import check_images, check_inputs, check_labels
from perdure.data.clients import with_clients
from perdure.data.labels import encode_labels
from perdure.data.source import Array, ConfigLocation, Examples, Source
from perdure.data.subsets import stratified_split

_PLAIN = ("x_train", "y_train", "x_test", "y_test")
_DOMAINS = ("x", "y", "domain", "is_test")


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


def load_npz(config: NpzData, location: ConfigLocation) -> Source:
    """Load an npz file with x_train, y_train, x_test and y_test, or the union of its domains."""
    path = _file(config, location)
    try:
        arrays = _read(path)
        clients = _clients(arrays, location)
        if "x" in arrays:
            return _pooled(path.stem, arrays, clients)
        source = _plain(path.stem, arrays)
        if clients is None:
            return source
        return with_clients(source, _one_per_row(clients, len(source.train), location))
    except ValueError as error:
        raise location.error("path", path, f"a valid npz file ({error})") from None


def load_npz_domains(config: NpzData, location: ConfigLocation) -> list[Source]:
    """Load one source per domain of an npz file with x, y, domain, is_test and domain_names."""
    path = _file(config, location)
    try:
        arrays = _read(path)
        return _domains(arrays, _clients(arrays, location))
    except ValueError as error:
        raise location.error("path", path, f"an npz file with domains ({error})") from None


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


def _require(arrays: dict[str, Array], names: tuple[str, ...]) -> list[Array]:
    missing = [name for name in names if name not in arrays]
    if missing:
        raise ValueError(f"{', '.join(missing)} not found among {', '.join(arrays) or 'no arrays'}")
    return [arrays[name] for name in names]


def _names(arrays: dict[str, Array], *keys: str) -> tuple[str, ...] | None:
    names = next((arrays[key] for key in keys if key in arrays), None)
    if names is not None and names.ndim != 1:
        raise ValueError(f"{keys[0]} has shape {names.shape}, not one dimension")
    return None if names is None else tuple(str(name) for name in names)


def _plain(name: str, arrays: dict[str, Array]) -> Source:
    x_train, y_train, x_test, y_test = _require(arrays, _PLAIN)
    train, test = check_inputs(x_train, "x_train"), check_inputs(x_test, "x_test")
    if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
        kinds = [f"{x.dtype} rows of {tuple(x.shape[1:])}" for x in (train, test)]
        raise ValueError(f"x_train has {kinds[0]}, x_test {kinds[1]}".replace("torch.", ""))
    names = _names(arrays, "class_names", "fine_names")
    labels, test_labels, classes = encode_labels(y_train, y_test, names, (len(train), len(test)))
    return Source(
        name,
        Examples(train, torch.from_numpy(labels)),
        Examples(test, torch.from_numpy(test_labels)),
        classes,
    )


def _clients(arrays: dict[str, Array], location: ConfigLocation) -> Array | None:
    """Return the names of the clients of the rows, or None if no array names them."""
    name = location.client_column
    if name is None:
        return None
    if name not in arrays:
        raise location.client_error(f"an array of the npz file: {', '.join(arrays)}")
    return arrays[name].astype(str)


def _one_per_row(clients: Array, rows: int, location: ConfigLocation) -> Array:
    if clients.shape != (rows,):
        name = location.client_column
        raise ValueError(f"{name} has shape {clients.shape} for {rows} rows, not one per row")
    return clients


def _pooled(name: str, arrays: dict[str, Array], clients: Array | None) -> Source:
    x, y, _, is_test, classes = _domain_arrays(arrays)
    unseen = np.setdiff1d(y[is_test], y[~is_test])
    if len(unseen) and not is_test.all():
        raise ValueError(f"the label {classes[unseen[0]]} occurs in test rows alone")
    return _select(name, x, y, is_test, np.ones(len(y), bool), classes, clients)


def _domains(arrays: dict[str, Array], clients: Array | None) -> list[Source]:
    x, y, domain, is_test, classes = _domain_arrays(arrays)
    names = _names(arrays, "domain_names") or tuple(str(d) for d in range(int(domain.max()) + 1))
    if domain.max() >= len(names):
        raise ValueError(f"domain {domain.max()} is out of range: there are {len(names)} names")
    return [
        _select(name, x, y, is_test, domain == d, classes, clients) for d, name in enumerate(names)
    ]


def _domain_arrays(
    arrays: dict[str, Array],
) -> tuple[Tensor, Array, Array, Array, tuple[str, ...]]:
    x, y, domain, is_test = _require(arrays, _DOMAINS)
    inputs, domain = check_inputs(x, "x"), check_labels(domain, len(x), "domain")
    if is_test.shape != (len(x),):
        raise ValueError(f"is_test has shape {is_test.shape} for {len(x)} rows")
    y, _, classes = encode_labels(y, y[:0], _names(arrays, "class_names"), (len(x), 0))
    return inputs, y, domain, is_test.astype(bool), classes


def _select(
    name: str,
    x: Tensor,
    y: Array,
    is_test: Array,
    selected: Array,
    classes: tuple[str, ...],
    clients: Array | None,
) -> Source:
    """Return the source of the selected rows (bool)."""
    train, test = selected & ~is_test, selected & is_test
    if not train.any() or not test.any():
        raise ValueError(f"{name} has no rows to {'train' if test.any() else 'test'} on")
    rows = Examples(x, torch.from_numpy(y))
    parts = [rows.select(np.flatnonzero(part)) for part in (train, test)]
    source = Source(name, parts[0], parts[1], classes)
    if clients is None:
        return source
    if clients.shape != y.shape:
        raise ValueError(f"the clients have shape {clients.shape} for {len(y)} rows")
    return with_clients(source, clients[train], clients[test])
