"""Tables with one example per row: CSV and Parquet files, and the frames of pandas."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TextIO

import numpy as np
from pydantic import Field

from perdure.config import DataConfig
from perdure.config.section import OpenFraction, Text
from perdure.core.errors import UserError
from perdure.core.registry import is_installed, require
from perdure.core.rng import Rng
from perdure.data.examples import Array, Source
from perdure.data.examples import Text as TextRow
from perdure.data.labels import sort_names
from perdure.data.rows import RawData, RawRows, Reading, rows_domains, rows_source
from perdure.data.source import ConfigLocation, ObjectKeys

# ---- Columns of CSV and Parquet files: numbers for features, strings for everything else

_TRUTH = {"true": "1", "false": "0"}
_PARQUET = ".parquet"
TABLE_SUFFIXES = (".csv", ".csv.gz", _PARQUET)


@dataclass(frozen=True)
class TableFile:
    """A file that holds one example per row."""

    path: Path
    delimiter: str = ","
    key: str = "data.path"
    bad_is_nan: bool = False

    @property
    def is_parquet(self) -> bool:
        """Whether the file is in Parquet's format."""
        return self.path.suffix.lower() == _PARQUET

    def names(self) -> list[str]:
        """Return the names of the columns; ValueError if the file cannot be read."""
        if self.is_parquet:
            return [str(name) for name in self._parquet().schema_arrow.names]
        header = next(iter(self._lines(limit=1)), [])
        repeated = next((name for name in header if header.count(name) > 1), None)
        if not header or repeated is not None:
            raise ValueError(
                "it is empty" if not header else f"two columns are called {repeated!r}"
            )
        return header

    def read(self, numbers: Sequence[str], words: Sequence[str]) -> tuple[Array, list[list[str]]]:
        """Return columns of numbers, float64 [rows, numbers], and columns of strings.

        Raises:
            ValueError: A column is missing, there are no rows, or a value is missing or no number
                (unless `bad_is_nan`).

        """
        known = self.names()
        missing = next((name for name in (*words, *numbers) if name not in known), None)
        if missing is not None:
            raise ValueError(f"there is no column {missing!r} among {shortened(known)}")
        read = self._read_parquet if self.is_parquet else self._read_csv
        return checked_columns(*read(numbers, words), numbers, words, self.bad_is_nan)

    def _parquet(self) -> Any:
        parquet = require("pyarrow.parquet", self.key, "tables", "for Parquet files")
        try:
            return parquet.ParquetFile(self.path)
        except (OSError, ValueError) as error:  # Arrow's errors are subclasses
            raise ValueError(f"it cannot be read: {_first_line(error)}") from None

    def _read_parquet(
        self, numbers: Sequence[str], words: Sequence[str]
    ) -> tuple[Array, list[list[str]]]:
        table = self._parquet().read(columns=[*numbers, *words])
        return _columns(table, numbers, words, self.bad_is_nan)

    def _read_csv(
        self, numbers: Sequence[str], words: Sequence[str]
    ) -> tuple[Array, list[list[str]]]:
        fast = self._read_with_arrow(numbers, words)
        return fast or self.read_lines(numbers, words)

    def _read_with_arrow(
        self, numbers: Sequence[str], words: Sequence[str]
    ) -> tuple[Array, list[list[str]]] | None:
        """Return the columns as pyarrow reads them; None if it is missing or finds a mistake."""
        if not is_installed("pyarrow"):
            return None
        pyarrow, arrow_csv = import_module("pyarrow"), import_module("pyarrow.csv")
        types = dict.fromkeys(words, pyarrow.string()) | dict.fromkeys(numbers, pyarrow.float64())
        convert = arrow_csv.ConvertOptions(column_types=types, include_columns=list(types))
        parse = arrow_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True)
        try:
            table = arrow_csv.read_csv(self.path, parse_options=parse, convert_options=convert)
        except (OSError, ValueError):
            return None  # the standard library says in which line
        return _columns(table, numbers, words)

    def read_lines(
        self, numbers: Sequence[str], words: Sequence[str]
    ) -> tuple[Array, list[list[str]]]:
        header, *rows = self._lines()
        for number, row in enumerate(rows, 2):
            if len(row) != len(header):
                raise ValueError(f"line {number} has {len(row)} values for {len(header)} columns")
        places = {name: place for place, name in enumerate(header)}
        strings = [[row[places[name]] for row in rows] for name in words]
        columns = [
            number_column([row[places[name]] for row in rows], name, self.bad_is_nan)
            for name in numbers
        ]
        return np.stack(columns, 1) if columns else np.empty((len(rows), 0)), strings

    def _lines(self, limit: int | None = None) -> list[list[str]]:
        try:
            with self._open() as file:
                lines = csv.reader(file, delimiter=self.delimiter)
                filled = (line for line in lines if line)
                return [line for line, _ in zip(filled, range(limit or 10**12), strict=False)]
        except (OSError, EOFError, zlib.error, csv.Error, UnicodeError) as error:
            raise ValueError(f"it cannot be read: {_first_line(error)}") from None

    def _open(self) -> TextIO:
        if self.path.suffix.lower() == ".gz":
            return gzip.open(self.path, "rt", encoding="utf-8-sig", newline="")
        return self.path.open(encoding="utf-8-sig", newline="")


def checked_columns(
    values: Array,
    strings: list[list[str]],
    numbers: Sequence[str],
    words: Sequence[str],
    bad_is_nan: bool = False,
) -> tuple[Array, list[list[str]]]:
    """Return columns of numbers and of strings; ValueError if there are no rows or gaps.

    Args:
        values: Columns of numbers, float64 [rows, numbers].
        strings: Columns of strings.
        numbers: Names of the columns of numbers.
        words: Names of the columns of strings.
        bad_is_nan: Whether numbers may be missing.

    """
    if not len(strings[0] if strings else values):
        raise ValueError("it has no rows")
    if not bad_is_nan:
        _check_complete(values, numbers)
    _check_words(strings, words)
    return values, strings


def _columns(
    table: Any, numbers: Sequence[str], words: Sequence[str], bad_is_nan: bool = False
) -> tuple[Array, list[list[str]]]:
    """Return the columns of an Arrow table."""
    strings = [_strings(table.column(name).to_pylist()) for name in words]
    columns = [number_column(table.column(name), name, bad_is_nan) for name in numbers]
    return np.stack(columns, 1) if columns else np.empty((table.num_rows, 0)), strings


def _strings(values: list[Any]) -> list[str]:
    return ["" if value is None else str(value) for value in values]


def number_column(values: Any, name: str, bad_is_nan: bool = False) -> Array:
    """Return a column as float64, with NaN for missing values; ValueError if it holds others."""
    if isinstance(values, list):
        lowered = (value.strip().lower() for value in values)
        array = np.array([_TRUTH.get(value, value or "nan") for value in lowered])
    else:
        array = values.to_numpy()
    if array.dtype == object and all(value is None or isinstance(value, bool) for value in array):
        array = np.array([np.nan if value is None else float(value) for value in array])
    try:
        return np.asarray(array, np.float64)
    except (TypeError, ValueError):
        if bad_is_nan:
            return np.array([float(value) if _is_number(value) else np.nan for value in array])
        wrong = next(value for value in array if not _is_number(value))
        raise ValueError(
            f"the column {name!r} contains {str(wrong)!r}, which is not a number"
        ) from None


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _check_complete(values: Array, names: Sequence[str]) -> None:
    with np.errstate(over="ignore"):
        finite = np.isfinite(values.astype(np.float32))
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise ValueError(
            f"the column {names[column]!r} is missing, NaN, infinite or too large in row {row + 1}"
        )


def _check_words(columns: list[list[str]], names: Sequence[str]) -> None:
    for name, values in zip(names, columns, strict=True):
        if "" in values:
            raise ValueError(f"the column {name!r} has no value in row {values.index('') + 1}")


def shortened(names: Sequence[str]) -> str:
    """Return names for a sentence, the first ten of them."""
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# ---- Tables with one example per row: CSV and Parquet files, and the frames of pandas

_SPLITS = ("train", "test", "val", "valid", "validation")


class Columns(Protocol):
    """A table whose columns can be read."""

    def names(self) -> list[str]:
        """Return the names of the columns; ValueError if they cannot be read."""

    def read(self, numbers: Sequence[str], words: Sequence[str]) -> tuple[Array, list[list[str]]]:
        """Return columns of numbers, float64 [rows, numbers], and columns of strings."""


class TableData(DataConfig):
    """A CSV or Parquet file with one example per row.

    Example: `data: {source: table, path: patients.csv, label_column: diagnosis}`
    """

    has_numbers: ClassVar[bool] = True

    path: Text
    """The .csv, .csv.gz or .parquet file. Parquet needs `pip install 'perdure[tables]'`."""
    label_column: Text = "label"
    """Column of the labels, strings or integers; of the numbers with `target: number`."""
    feature_columns: Annotated[list[Text], Field(min_length=1)] | None = None
    """Columns of the features, which must be numbers. Default: all columns without another use."""
    split_column: Text | None = None
    """Column that is `train` or `test` (rows of `validation` are not used). If None, the rows are
    split with the seed."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if there is no `split_column`."""
    domain_column: Text | None = None
    """Column that names the domain of a row, for domain streams."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    """Character between the values of a line in a CSV file."""

    def load(self, rng: Rng, location: ConfigLocation) -> Source:
        """Load a table as one source."""
        rows = self._read(location)
        with self._reported(location):
            name = Path(self.path).stem.removesuffix(".csv")
            return rows_source(name, rows, Reading(rng, location, self.test_fraction))

    def load_domains(self, rng: Rng, location: ConfigLocation) -> list[Source]:
        """Load one source per value of `domain_column`, in the order of their names."""
        if self.domain_column is None:
            expected = "the column that names the domain of each row"
            raise location.error("domain_column", None, expected)
        rows = self._read(location)
        with self._reported(location):
            return rows_domains(rows, Reading(rng, location, self.test_fraction))

    def _read(self, location: ConfigLocation) -> RawData:
        path = Path(self.path)
        if not path.name.lower().endswith(TABLE_SUFFIXES):
            raise location.error("path", path, f"a file that ends in {', '.join(TABLE_SUFFIXES)}")
        if not path.is_file():
            raise location.error("path", path, "a table that exists")
        with self._reported(location):
            file = TableFile(path, self.delimiter, f"{location.key}.path")
            return table_rows(file, self, location)

    @contextmanager
    def _reported(self, location: ConfigLocation) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise location.error("path", self.path, f"a valid table ({error})") from None


def table_rows(
    columns: Columns,
    config: TableData | ObjectKeys,
    location: ConfigLocation,
    texts: Sequence[str] = (),
) -> RawData:
    """Return the rows of a table.

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
    part = RawRows(x, strings["label_column"], strings.get("domain_column"), strings.get("clients"))
    train, test = _split(part, strings.get("split_column"), config)
    domains = () if part.domain is None else sort_names(part.domain)
    classes = sort_names(part.y)
    return RawData(train, test, classes, domains, None if texts else tuple(features))


def _texts(columns: list[list[str]]) -> list[TextRow]:
    if len(columns) == 1:
        return list(columns[0])
    return [(first, second) for first, second in zip(*columns, strict=True)]


def _split(part: RawRows, splits: Array | None, config: Any) -> tuple[RawRows, RawRows | None]:
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
    config: TableData | ObjectKeys, names: list[str], location: ConfigLocation
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
    config: TableData | ObjectKeys,
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


# ---- Frames of pandas, read like a table


@dataclass(frozen=True)
class FrameColumns:
    """The columns of a pandas DataFrame."""

    frame: Any

    def names(self) -> list[str]:
        """Return the names of the columns."""
        names = [str(name) for name in self.frame.columns]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"two columns are called {repeated!r}")
        return names

    def read(self, numbers: Sequence[str], words: Sequence[str]) -> tuple[Array, list[list[str]]]:
        """Return columns of numbers, float64 [rows, numbers], and columns of strings.

        Raises:
            ValueError: There are no rows, or a value is missing or no number.

        """
        columns = {str(name): self.frame[name] for name in self.frame.columns}
        strings = [_frame_strings(columns[name]) for name in words]
        values = [number_column(columns[name], name) for name in numbers]
        table = np.stack(values, 1) if values else np.empty((len(self.frame), 0))
        return checked_columns(table, strings, numbers, words)


def frame_features(frame: Any, names: Sequence[str]) -> Array:
    """Return columns of a frame as features: float32 [rows, names].

    Raises:
        UserError: A column is missing, or a value is missing or no number.

    """
    columns = FrameColumns(frame)
    missing = next((name for name in names if name not in columns.names()), None)
    if missing is not None:
        raise UserError(
            f"input: must have the column {missing!r}, got {shortened(columns.names())}"
        )
    try:
        return columns.read(names, [])[0].astype(np.float32)
    except ValueError as error:
        raise UserError(f"input: must be valid features ({error}), got DataFrame") from None


def _frame_strings(column: Any) -> list[str]:
    """Return a column as strings, with "" for missing values."""
    missing = column.isna().tolist()
    return ["" if gap else str(v) for v, gap in zip(column.tolist(), missing, strict=True)]
