"""Labeled rows as files and Python objects hold them, and the sources that are made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from perdure.core.rng import Rng
from perdure.data.clients import with_clients
from perdure.data.examples import Array, Examples, Source, Text
from perdure.data.labels import encode_labels
from perdure.data.source import ConfigLocation, check_inputs, check_tensor
from perdure.data.text import hash_words

# ---- Random subsets of a source: a test split, and limits on the number of examples


def stratified_split(y: Array, fraction: float, rng: np.random.Generator) -> tuple[Array, Array]:
    """Split examples at random into training and test, with the same fraction of every class.

    A class of two examples or more has at least one on either side.

    Args:
        y: Labels, [N].
        fraction: Fraction of the test examples.
        rng: Generator of the draws.

    """
    held_out = []
    for label in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == label))
        count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
        held_out.append(rows[:count])
    test = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(y)), test, assume_unique=True), test


def limit_train(source: Source, limit: int | None, rng: np.random.Generator) -> Source:
    """Return the source with at most `limit` random training examples, in their order.

    If `limit` is None, the source is returned unchanged.
    """
    if limit is None or limit >= len(source.train):
        return source
    return replace(source, train=source.train.select(_random_rows(len(source.train), limit, rng)))


def limit_test(source: Source, limit: int | None, rng: np.random.Generator) -> Source:
    """Return the source with at most `limit` random test examples, as `limit_train` does."""
    if limit is None or limit >= len(source.test):
        return source
    return replace(source, test=source.test.select(_random_rows(len(source.test), limit, rng)))


def _random_rows(rows: int, limit: int, rng: np.random.Generator) -> Array:
    return np.sort(rng.choice(rows, limit, replace=False))


# ---- Labeled rows as a file or a Python object holds them, and the sources that are made of them.

_DATA = ConfigLocation()


@dataclass(frozen=True)
class RawRows:
    """Training rows, test rows, or both."""

    x: Array | Tensor | list[Text]
    """Inputs: an array as `check_inputs` takes it, a tensor with channels first, or texts."""
    y: Array
    """Labels [N] or [N, 1]: integers from 0, or strings; or numbers."""
    domain: Array | None = None
    """Name of the domain of each row, strings [N]. If None, there are no domains."""
    clients: Array | None = None
    """Name of the client of each row, strings [N]. If None, it is not known."""
    suffix: str = ""
    """What follows x and y in the names of the arrays, for messages: `_train`, `_test` or ``."""

    def __len__(self) -> int:
        return len(self.y)

    @property
    def texts(self) -> list[Text] | None:
        """The inputs if they are texts."""
        return self.x if isinstance(self.x, list) else None

    def checked(self) -> RawRows:
        """Return the rows with their inputs as a checked tensor; texts are left as they are.

        Raises:
            ValueError: The inputs are invalid; a row is counted from the first of these.

        """
        if isinstance(self.x, list):
            return self
        name = f"x{self.suffix}"
        if isinstance(self.x, Tensor):
            return replace(self, x=check_tensor(self.x, name))
        return replace(self, x=check_inputs(self.x, name))

    def select(self, index: Array) -> RawRows:
        """Return the rows at some positions (int64)."""
        x: Array | Tensor | list[Text]
        if isinstance(self.x, list):
            x = [self.x[row] for row in index.tolist()]
        else:
            x = self.x[torch.from_numpy(index)] if isinstance(self.x, Tensor) else self.x[index]
        domain, clients = (None if v is None else v[index] for v in (self.domain, self.clients))
        return replace(self, x=x, y=self.y[index], domain=domain, clients=clients)


@dataclass(frozen=True)
class RawData:
    """Labeled rows of one source, or of several domains."""

    train: RawRows
    test: RawRows | None = None
    """Test rows. If None, a part of the training rows is held out with the seed."""
    class_names: tuple[str, ...] | None = None
    """Names of the classes, by label. If None, those that occur."""
    domain_names: tuple[str, ...] = ()
    """Names of the domains in their order."""
    feature_names: tuple[str, ...] | None = None
    """Names of the features. If None, they have none."""


@dataclass(frozen=True)
class Reading:
    """What turns rows into sources, beside the rows."""

    rng: Rng
    """Derives the draw of test rows."""
    location: ConfigLocation = _DATA
    """The position of the source in the config, whose number is that of the draw."""
    test_fraction: float = 0.2
    """Fraction of every class that is held out for testing if there are no test rows."""
    features: int = 1024
    """Size of the hashed word counts of a text."""

    @property
    def numbers(self) -> bool:
        """Whether targets are numbers, by `data.target`."""
        return self.location.numbers

    def numbered(self, number: int) -> Reading:
        """Return the reading of another source of the stream."""
        return replace(self, location=replace(self.location, number=number))


def rows_source(name: str, rows: RawData, reading: Reading) -> Source:
    """Return the source of rows; domains are pooled.

    Raises:
        ValueError: The rows are invalid, or a label occurs in test rows alone.

    """
    train, test = _parts(name, rows.train, rows.test, reading)
    train, test, classes = _numbered(train, test, rows.class_names, reading)
    unseen = np.setdiff1d(test.y, train.y)
    if len(unseen) and not (reading.numbers or reading.location.is_node):
        raise ValueError(f"the label {classes[unseen[0]]!r} occurs in test rows alone")
    return _source(name, train, test, classes, rows, reading)


def rows_domains(rows: RawData, reading: Reading) -> list[Source]:
    """Return one source per domain, all with the same classes; a domain may lack some of them.

    Raises:
        ValueError: The rows are invalid, or there are no domains.

    """
    if not rows.domain_names:
        raise ValueError("it names no domains")
    classes = _all_classes(rows, reading)
    sources = []
    for number, name in enumerate(rows.domain_names):
        of_domain = reading.numbered(number)
        test = None if rows.test is None else _of_domain(rows.test, name)
        parts = _parts(name, _of_domain(rows.train, name), test, of_domain)
        train, test, _ = _numbered(*parts, classes, reading)
        sources.append(_source(name, train, test, classes, rows, of_domain))
    return sources


def _of_domain(part: RawRows, name: str) -> RawRows:
    if part.domain is None:
        raise ValueError(f"the rows of x{part.suffix} name no domain")
    return part.select(np.flatnonzero(part.domain == name))


def _parts(
    name: str, train: RawRows, test: RawRows | None, reading: Reading
) -> tuple[RawRows, RawRows]:
    """Return training and test rows, split with the seed if there are no test rows."""
    if test is None and len(train):
        generator = reading.rng.numpy_generator("holdout", reading.location.number)
        labels = _one_dimension(train.y, len(train.x)).astype(str)
        labels = np.zeros(len(labels)) if reading.numbers else labels
        index, held_out = stratified_split(labels, reading.test_fraction, generator)
        train = train.checked()
        train, test = train.select(index), train.select(held_out)
    if test is not None and test.y.ndim > 1 and not len(test):
        raise ValueError(f"y{test.suffix} has shape {test.y.shape}, not one label per row")
    if not len(train) or test is None or not len(test):
        raise ValueError(f"{name} has no rows to {'test' if len(train) else 'train'} on")
    return train, test


def _one_dimension(y: Array, rows: int) -> Array:
    if y.shape not in ((rows,), (rows, 1)):
        raise ValueError(f"y has shape {y.shape} for {rows} rows, not one label per row")
    return y.reshape(rows)


def _numbered(
    train: RawRows, test: RawRows, names: tuple[str, ...] | None, reading: Reading
) -> tuple[RawRows, RawRows, tuple[str, ...]]:
    """Return the parts with labels as int64 [N] (numbers as double), and the classes."""
    sizes, keys = (len(train.x), len(test.x)), _keys(train, test)
    y, y_test, classes = encode_labels(train.y, test.y, names, sizes, keys, reading.numbers)
    return replace(train, y=y), replace(test, y=y_test), classes


def _keys(train: RawRows, test: RawRows) -> tuple[str, str]:
    return f"y{train.suffix}", f"y{test.suffix}"


def _all_classes(rows: RawData, reading: Reading) -> tuple[str, ...]:
    """Return the names of the classes of all domains."""
    parts = [rows.train] if rows.test is None else [rows.train, rows.test]
    y = np.concatenate([_one_dimension(part.y, len(part.x)) for part in parts])
    sizes, keys = (len(y), 0), ("y", "y")
    return encode_labels(y, y[:0], rows.class_names, sizes, keys, reading.numbers)[2]


def _source(
    name: str,
    train: RawRows,
    test: RawRows,
    classes: tuple[str, ...],
    rows: RawData,
    reading: Reading,
) -> Source:
    x, x_test = (_inputs(part, reading) for part in (train, test))
    _check_alike(x, x_test, train.suffix, test.suffix)
    examples = [
        Examples(values, torch.from_numpy(part.y), texts=part.texts)
        for values, part in ((x, train), (x_test, test))
    ]
    source = Source(name, examples[0], examples[1], classes, rows.feature_names)
    if train.clients is None:
        return source
    return with_clients(source, train.clients, test.clients)


def _inputs(part: RawRows, reading: Reading) -> Tensor:
    x = part.checked().x
    return x if isinstance(x, Tensor) else hash_words(list(x), reading.features)


def _check_alike(x: Tensor, x_test: Tensor, *suffixes: str) -> None:
    if x.shape[1:] == x_test.shape[1:] and x.dtype == x_test.dtype:
        return
    kinds = [f"{each.dtype} rows of {tuple(each.shape[1:])}" for each in (x, x_test)]
    sentence = f"x{suffixes[0]} has {kinds[0]}, x{suffixes[1]} {kinds[1]}"
    raise ValueError(sentence.replace("torch.", ""))
