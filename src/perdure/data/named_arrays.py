"""Named arrays as labeled rows: the layout of npz files and of dicts in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from perdure.data.checks import check_labels
from perdure.data.rows import Part, Rows
from perdure.data.source import Array, ConfigLocation

_TRAIN, _TEST = ("x_train", "y_train"), ("x_test", "y_test")


def array_rows(arrays: Mapping[str, Any], location: ConfigLocation) -> Rows:
    """Return the rows of arrays: x and y with domain and is_test, or x_train and y_train.

    Args:
        arrays: By name: `x` (inputs) and `y` (labels), optional `domain`, `is_test`,
            `domain_names`; or `x_train` and `y_train`, optional `x_test` and `y_test`. Optional
            `class_names`, and the array that `clients.partition.name` names.
        location: The position of the source, which names the array of the clients.

    Raises:
        ValueError: An array is missing or does not fit the others.
        UserError: The array of the clients is missing.
    """
    names = _names(arrays, "class_names", "fine_names")
    if "x" in arrays:
        return _with_columns(arrays, location, names)
    _require(arrays, _TRAIN)
    clients = _clients(arrays, _count(arrays, "x_train"), location)
    train = Part(arrays["x_train"], arrays["y_train"], clients=clients, suffix="_train")
    test = None
    if any(name in arrays for name in _TEST):
        _require(arrays, _TEST)
        _count(arrays, "x_test")
        test = Part(arrays["x_test"], arrays["y_test"], suffix="_test")
    return Rows(train, test, names)


def _with_columns(
    arrays: Mapping[str, Any], location: ConfigLocation, names: tuple[str, ...] | None
) -> Rows:
    _require(arrays, ("x", "y"))
    count = _count(arrays, "x")
    domain, domain_names = _domains(arrays, count)
    rows = Part(arrays["x"], arrays["y"], domain, _clients(arrays, count, location))
    if "is_test" not in arrays:
        return Rows(rows, None, names, domain_names)
    is_test = _one_per_row(np.asarray(arrays["is_test"]), count, "is_test").astype(bool)
    if rows.y.shape not in ((count,), (count, 1)):
        raise ValueError(f"y has shape {rows.y.shape} for {count} rows, not one label per row")
    rows = rows.checked()
    train, test = (rows.select(np.flatnonzero(part)) for part in (~is_test, is_test))
    return Rows(train, test, names, domain_names)


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
