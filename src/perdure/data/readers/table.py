"""Tables: CSV and Parquet files with one example per row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from perdure.config import TableData
from perdure.core.rng import Rng
from perdure.data.clients import with_clients
from perdure.data.labels import ClassNames, number_labels, sort_names
from perdure.data.readers.table_columns import TABLE_SUFFIXES, TableFile, shortened
from perdure.data.source import Array, ConfigLocation, Examples, Source
from perdure.data.subsets import stratified_split

_SPLITS = {"train": 0, "test": 1, "val": 2, "valid": 2, "validation": 2}


def load_table(config: TableData, rng: Rng, location: ConfigLocation) -> Source:
    """Load a table as one source."""
    table = _read(config, location)
    with _reported(config, location):
        return _source(Path(config.path).stem.removesuffix(".csv"), table, config, rng, location)


def load_table_domains(config: TableData, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load one source per value of `domain_column`, in the order of their names."""
    if config.domain_column is None:
        raise location.error("domain_column", None, "the column that names the domain of each row")
    table = _read(config, location)
    assert table.domains is not None
    names = sort_names(table.domains)
    with _reported(config, location):
        return [
            _source(
                name, table.select(np.flatnonzero(table.domains == name)), config, rng,
                replace(location, number=number),
            )
            for number, name in enumerate(names)
        ]  # fmt: skip


@dataclass(frozen=True)
class _Table:
    """The rows of a file."""

    features: Array
    """float64 [rows, columns]."""
    feature_names: tuple[str, ...]
    labels: Array
    """Strings [rows]."""
    classes: ClassNames
    """The labels that occur."""
    splits: Array | None
    """Strings [rows]. If None, the file names no split."""
    domains: Array | None
    """Strings [rows]. If None, the file names no domains."""
    clients: Array | None
    """Strings [rows]. If None, the file names no clients."""

    def select(self, index: Array) -> _Table:
        """Return some of the rows, with the classes of all."""
        words = (self.splits, self.domains, self.clients)
        splits, domains, clients = (None if w is None else w[index] for w in words)
        return replace(
            self, features=self.features[index], labels=self.labels[index], splits=splits,
            domains=domains, clients=clients,
        )  # fmt: skip


def _read(config: TableData, location: ConfigLocation) -> _Table:
    path = Path(config.path)
    if not path.name.lower().endswith(TABLE_SUFFIXES):
        raise location.error("path", path, f"a file that ends in {', '.join(TABLE_SUFFIXES)}")
    if not path.is_file():
        raise location.error("path", path, "a table that exists")
    file = TableFile(path, config.delimiter, f"{location.key}.path")
    with _reported(config, location):
        names = file.names()
    columns = _word_columns(config, names, location)
    features = _feature_columns(config, names, columns, location)
    with _reported(config, location):
        numbers, words = file.read(features, list(columns.values()))
    strings = dict(zip(columns, (np.array(column) for column in words), strict=True))
    labels = strings["label_column"]
    return _Table(
        numbers, tuple(features), labels, sort_names(labels), strings.get("split_column"),
        strings.get("domain_column"), strings.get("clients"),
    )  # fmt: skip


def _word_columns(config: TableData, names: list[str], location: ConfigLocation) -> dict[str, str]:
    """Return the columns that are no features, by their key; UserError if one is not there."""
    keys = ("label_column", "split_column", "domain_column")
    columns = {key: getattr(config, key) for key in keys if getattr(config, key) is not None}
    for key, name in columns.items():
        if name not in names:
            raise location.error(key, name, f"a column of the table: {shortened(names)}")
    if location.client_column is None:
        return columns
    if location.client_column not in names:
        raise location.client_error(f"a column of the table: {shortened(names)}")
    return columns | {"clients": location.client_column}


def _feature_columns(
    config: TableData, names: list[str], words: dict[str, str], location: ConfigLocation
) -> list[str]:
    chosen = config.feature_columns
    if chosen is None:
        chosen = [name for name in names if name not in words.values()]
    wrong = next((name for name in chosen if name not in names or name in words.values()), None)
    if wrong is not None:
        others = [name for name in names if name not in words.values()]
        raise location.error("feature_columns", wrong, f"columns of the table: {shortened(others)}")
    if not chosen:
        raise location.error("path", config.path, "a table with columns beside the label")
    return chosen


@contextmanager
def _reported(config: TableData, location: ConfigLocation) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise location.error("path", config.path, f"a valid table ({error})") from None


def _source(
    name: str, table: _Table, config: TableData, rng: Rng, location: ConfigLocation
) -> Source:
    train, test = _split(table, config, rng, location)
    if not len(train) or not len(test):
        raise ValueError(f"{name} has no rows to {'test' if len(train) else 'train'} on")
    if config.domain_column is None:
        unseen = sorted(set(table.labels[test]) - set(table.labels[train]))
        if unseen:
            raise ValueError(f"the label {str(unseen[0])!r} occurs in test rows alone")
    y = number_labels(table.labels, table.classes, config.label_column)
    rows = Examples(torch.from_numpy(table.features.astype(np.float32)), torch.from_numpy(y))
    source = Source(
        name, rows.select(train), rows.select(test), table.classes,
        feature_names=table.feature_names,
    )  # fmt: skip
    clients = table.clients
    return source if clients is None else with_clients(source, clients[train], clients[test])


def _split(
    table: _Table, config: TableData, rng: Rng, location: ConfigLocation
) -> tuple[Array, Array]:
    """Return the training and the test rows; rows for validation are not used."""
    if table.splits is None:
        generator = rng.numpy_generator("holdout", location.number)
        return stratified_split(table.labels, config.test_fraction, generator)
    lowered = np.char.lower(table.splits)
    other = next((str(name) for name in np.unique(lowered) if name not in _SPLITS), None)
    if other is not None:
        column = f"the column {config.split_column!r}"
        raise ValueError(f"{column} contains {other!r}, not train, test or validation")
    return np.flatnonzero(lowered == "train"), np.flatnonzero(lowered == "test")
