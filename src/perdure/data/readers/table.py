"""Tables with one example per row: CSV and Parquet files, and the frames of pandas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from perdure.config import CustomData, TableData
from perdure.core.rng import Rng
from perdure.data.labels import sort_names
from perdure.data.readers.table_columns import TABLE_SUFFIXES, TableFile, shortened
from perdure.data.rows import Part, Reading, Rows, rows_domains, rows_source
from perdure.data.source import Array, ConfigLocation, Source, Text

_SPLITS = ("train", "test", "val", "valid", "validation")


class Columns(Protocol):
    """A table whose columns can be read."""

    def names(self) -> list[str]:
        """Return the names of the columns; ValueError if they cannot be read."""

    def read(self, numbers: Sequence[str], words: Sequence[str]) -> tuple[Array, list[list[str]]]:
        """Return columns of numbers, float64 [rows, numbers], and columns of strings."""


def load_table(config: TableData, rng: Rng, location: ConfigLocation) -> Source:
    """Load a table as one source."""
    rows = _read(config, location)
    with _reported(config, location):
        name = Path(config.path).stem.removesuffix(".csv")
        return rows_source(name, rows, _reading(config, rng, location))


def load_table_domains(config: TableData, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load one source per value of `domain_column`, in the order of their names."""
    if config.domain_column is None:
        raise location.error("domain_column", None, "the column that names the domain of each row")
    rows = _read(config, location)
    with _reported(config, location):
        return rows_domains(rows, _reading(config, rng, location))


def _reading(config: TableData, rng: Rng, location: ConfigLocation) -> Reading:
    return Reading(rng, location, config.test_fraction)


def _read(config: TableData, location: ConfigLocation) -> Rows:
    path = Path(config.path)
    if not path.name.lower().endswith(TABLE_SUFFIXES):
        raise location.error("path", path, f"a file that ends in {', '.join(TABLE_SUFFIXES)}")
    if not path.is_file():
        raise location.error("path", path, "a table that exists")
    with _reported(config, location):
        return table_rows(
            TableFile(path, config.delimiter, f"{location.key}.path"), config, location
        )


@contextmanager
def _reported(config: TableData, location: ConfigLocation) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise location.error("path", config.path, f"a valid table ({error})") from None


def table_rows(
    columns: Columns,
    config: TableData | CustomData,
    location: ConfigLocation,
    texts: Sequence[str] = (),
) -> Rows:
    """Return the rows of a table.

    Args:
        columns: The table.
        config: The section that names the columns.
        location: The position of the section in the config.
        texts: Columns of texts, one or two. If there are none, the features are numbers.

    Raises:
        ValueError: A value is invalid, or the table has no column beside the label.
        UserError: A column that the config names is missing.
    """
    names = columns.names()
    used = _word_columns(config, names, location)
    features = [] if texts else _feature_columns(config, names, used, location)
    numbers, words = columns.read(features, [*used.values(), *texts])
    strings = dict(zip(used, (np.array(column) for column in words), strict=False))
    x = _texts(words[len(used) :]) if texts else numbers.astype(np.float32)
    part = Part(x, strings["label_column"], strings.get("domain_column"), strings.get("clients"))
    train, test = _split(part, strings.get("split_column"), config)
    domains = () if part.domain is None else sort_names(part.domain)
    classes = sort_names(part.y)
    return Rows(train, test, classes, domains, None if texts else tuple(features))


def _texts(columns: list[list[str]]) -> list[Text]:
    if len(columns) == 1:
        return list(columns[0])
    return [(first, second) for first, second in zip(*columns, strict=True)]


def _split(part: Part, splits: Array | None, config: Any) -> tuple[Part, Part | None]:
    """Return the training and the test rows; rows for validation are not used."""
    if splits is None:
        return part, None
    lowered = np.char.lower(splits)
    other = next((str(name) for name in np.unique(lowered) if name not in _SPLITS), None)
    if other is not None:
        column = f"the column {config.split_column!r}"
        raise ValueError(f"{column} contains {other!r}, not train, test or validation")
    train, test = (part.select(np.flatnonzero(lowered == name)) for name in ("train", "test"))
    return train, test


def _word_columns(
    config: TableData | CustomData, names: list[str], location: ConfigLocation
) -> dict[str, str]:
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
    config: TableData | CustomData,
    names: list[str],
    words: dict[str, str],
    location: ConfigLocation,
) -> list[str]:
    chosen = config.feature_columns
    if chosen is None:
        chosen = [name for name in names if name not in words.values()]
    wrong = next((name for name in chosen if name not in names or name in words.values()), None)
    if wrong is not None:
        others = [name for name in names if name not in words.values()]
        raise location.error("feature_columns", wrong, f"columns of the table: {shortened(others)}")
    if not chosen:
        raise ValueError("it has no columns beside the label")
    return chosen
