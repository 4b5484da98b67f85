"""Labels of sources: the classes that they name, one label space for several, and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from perdure.core.errors import UserError
from perdure.data.examples import Array, Examples, Source
from perdure.data.source import check_classes, check_labels

# ---- Targets that are numbers (`data.target: number`), and their one class
#
# Where classes are counted, all examples with numbers are of one class, whose output is the number.

NUMBER_CLASS = ("number",)
"""Names of the classes of examples whose targets are numbers."""


def class_labels(y: Tensor) -> Tensor:
    """Return labels as they are, and for numbers the label 0 of each: int64 [rows]."""
    return torch.zeros_like(y, dtype=torch.int64) if y.is_floating_point() else y


def check_numbers(y: Array, rows: int, name: str) -> Array:
    """Return targets as double [rows].

    Args:
        y: Numbers, or strings of numbers, [rows] or [rows, 1].
        rows: Number of examples.
        name: Name of the array in error messages.

    Raises:
        ValueError: `y` has another shape, or values that are no numbers or not finite.

    """
    if y.shape != (rows,) and y.shape != (rows, 1):
        raise ValueError(f"{name} has shape {y.shape} for {rows} rows, not one number per row")
    try:
        numbers = y.reshape(rows).astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} contains values that are not numbers") from None
    if not np.isfinite(numbers).all():
        row = int(np.argmin(np.isfinite(numbers)))
        raise ValueError(f"{name} contains a value in row {row} that is NaN or infinite")
    return numbers


# ---- Labels of a source, as numbers from 0 and the names that they stand for

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


# ---- Classes of several sources that share one label space: those of one name are one class


def unify_classes(sources: Sequence[Source]) -> list[Source]:
    """Return sources with one list of classes, joined by name, in the order of their appearance.

    Sources whose classes have no names, only numbers, keep their labels.

    Raises:
        UserError: A source has no class in common with those before it, or none with a name.

    """
    named = [source for source in sources if not _is_unnamed(source)]
    if len({source.class_names for source in named}) < 2:
        return list(sources)
    names: dict[str, int] = {}
    for source in sources:
        if _is_unnamed(source) or (names and not names.keys() & set(source.class_names)):
            raise _nothing_in_common(source, sources[0])
        for name in source.class_names:
            names.setdefault(name, len(names))
    return [relabel(source, names) for source in sources]


def append_classes(
    source: Source, known: tuple[str, ...], separate: bool, key: str
) -> tuple[Source, tuple[str, ...]]:
    """Return a source with its labels in a label space, and the space with its new classes.

    Raises:
        UserError: The classes so far have names, and those of the source only numbers.

    """
    if separate:
        names = tuple(f"{source.name}/{name}" for name in source.class_names)
        source = replace(source, class_names=names)
    elif _is_unnamed(source) and known != tuple(str(label) for label in range(len(known))):
        shown = ", ".join(known[:5])
        raise UserError(
            f"{key}: must name its classes as the run does ({shown}), got numbers; "
            "or labels must be 'separate', if all of them are new"
        )
    labels = {name: label for label, name in enumerate(known)}
    for name in source.class_names:
        labels.setdefault(name, len(labels))
    return relabel(source, labels), tuple(labels)


def _is_unnamed(source: Source) -> bool:
    return source.class_names == tuple(str(label) for label in range(len(source.class_names)))


def _nothing_in_common(source: Source, first: Source) -> UserError:
    shown = "; ".join(f"{s.name}: {', '.join(s.class_names[:5])}" for s in (first, source))
    return UserError(
        f"stream.labels: must be 'separate' for domains without a common class name ({shown}), "
        "got 'shared'"
    )


def relabel(source: Source, names: Mapping[str, int]) -> Source:
    """Return a source with the classes `names`, in whose order their labels are.

    Targets that are numbers stay as they are.
    """
    if source.train.y.is_floating_point():
        return source
    labels = torch.tensor([names[name] for name in source.class_names])

    def changed(rows: Examples) -> Examples:
        return replace(rows, y=labels[rows.y])

    return replace(source.map(changed), class_names=tuple(names))
