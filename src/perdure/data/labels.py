"""Labels of a source, as numbers from 0 and the names that they stand for."""

from __future__ import annotations

import numpy as np

from perdure.data.checks import check_classes, check_labels
from perdure.data.numbers import NUMBER_CLASS, check_numbers
from perdure.data.source import Array

ClassNames = tuple[str, ...]


def encode_labels(
    train: Array,
    test: Array,
    names: ClassNames | None,
    rows: tuple[int, int],
    keys: tuple[str, str] = ("y", "y"),
    numbers: bool = False,
) -> tuple[Array, Array, ClassNames]:
    """Return training and test labels as int64, and the names of the classes.

    Args:
        train: Integers from 0, or strings: [rows] or [rows, 1].
        test: Labels of the test set, as `train`; it may be empty.
        names: Names of the classes, by label. If None, those of strings are sorted, and those of
            integers are the integers.
        rows: Number of training and of test examples.
        keys: Names of the arrays in error messages.
        numbers: Whether targets are numbers, which are returned as double.

    Raises:
        ValueError: Labels are invalid, or a label of the test set does not occur in training.
    """
    if numbers:
        parts = zip((train, test), rows, keys, strict=True)
        values, test_values = (check_numbers(y, count, key) for y, count, key in parts)
        return values, test_values, NUMBER_CLASS
    if train.dtype.kind not in "US":
        labels = check_labels(train, rows[0], keys[0])
        test_labels = check_labels(test, rows[1], keys[1])
        return labels, test_labels, check_classes(labels, test_labels, names)
    strings = [_one_per_row(y, n, k) for y, n, k in zip((train, test), rows, keys, strict=True)]
    names = names or tuple(np.unique(strings[0]).tolist())
    return (
        number_labels(strings[0], names, keys[0]),
        number_labels(strings[1], names, keys[1]),
        names,
    )


def _one_per_row(y: Array, rows: int, name: str) -> Array:
    if y.shape != (rows,) and y.shape != (rows, 1):
        raise ValueError(f"{name} has shape {y.shape} for {rows} rows, not one label per row")
    return y.reshape(rows).astype(str)


def number_labels(labels: Array, names: ClassNames, key: str) -> Array:
    """Return strings as their positions in `names`, int64; ValueError if one is not there."""
    numbers = {name: number for number, name in enumerate(names)}
    unknown = next((label for label in labels.tolist() if label not in numbers), None)
    if unknown is not None:
        known = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise ValueError(f"{key} contains the label {unknown!r}, not one of {known}")
    return np.array([numbers[label] for label in labels.tolist()], np.int64)


def sort_names(values: Array) -> ClassNames:
    """Return the different strings: as integers if all are, else by letters."""
    names = [str(name) for name in np.unique(values)]
    is_integer = all(name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=int) if is_integer else names)
