"""Columns of CSV and Parquet files: numbers for features, strings for everything else."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from perdure.core.optional import is_installed, require
from perdure.data.source import Array

_TRUTH = {"true": "1", "false": "0"}
_PARQUET = ".parquet"
TABLE_SUFFIXES = (".csv", ".csv.gz", _PARQUET)


@dataclass(frozen=True)
class TableFile:
    """A file that holds one example per row.

    Args:
        path: A .csv, .csv.gz or .parquet file.
        delimiter: What separates the values of a line of a CSV file.
        key: Key in the sentence that asks for pyarrow.
        bad_is_nan: Whether a missing or bad number is NaN instead of an error.
    """

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

        Args:
            numbers: Names of columns of numbers.
            words: Names of columns whose values are taken as strings.

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
        return fast or self._read_lines(numbers, words)

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

    def _read_lines(
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
