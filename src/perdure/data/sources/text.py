"""Texts in JSON lines."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from perdure.config import DataConfig
from perdure.config.section import OpenFraction, PositiveInt, Text, TextColumn
from perdure.core.documents import json_value
from perdure.core.rng import Rng
from perdure.data.examples import Array, Source
from perdure.data.examples import Text as TextRow
from perdure.data.rows import RawData, RawRows, Reading, rows_domains, rows_source
from perdure.data.source import ConfigLocation

Row = dict[str, Any]
_TEST_SPLITS = ("test", "val", "validation")


class TextData(DataConfig):
    """Texts in JSON lines, one object per text.

    Example: `data: {source: text, path: reviews.jsonl.gz, text_column: review}`
    """

    has_texts: ClassVar[bool] = True

    path: Text
    """The .jsonl or .jsonl.gz file."""
    test_fraction: OpenFraction = 0.2
    """Fraction of the examples held out for testing, if no line has the field `split`."""
    label_column: str = "label"
    """Field of the labels."""
    text_column: TextColumn = "text"
    """Field of the texts, or the two fields of pairs of texts, such as [premise, hypothesis]."""
    features: PositiveInt = 1024
    """Size of the hashed bag of words of a text, for models other than `text`."""

    def load(self, rng: Rng, location: ConfigLocation) -> Source:
        """Load a source from a file of JSON lines."""
        path, lines = _lines(self, location)
        try:
            rows = _rows(lines, self, location, with_domains=False)
            return rows_source(_stem(path), rows, self._reading(rng, location))
        except ValueError as error:
            raise location.error("path", path, f"JSON lines with valid labels ({error})") from None

    def load_domains(self, rng: Rng, location: ConfigLocation) -> list[Source]:
        """Load one source per value of the field `domain`, in the order of their names."""
        path, lines = _lines(self, location)
        if not all("domain" in row for row in lines):
            raise location.error("path", path, "JSON lines that all have the field 'domain'")
        try:
            rows = _rows(lines, self, location, with_domains=True)
            return rows_domains(rows, self._reading(rng, location))
        except ValueError as error:
            raise location.error("path", path, f"JSON lines with valid labels ({error})") from None

    def _reading(self, rng: Rng, location: ConfigLocation) -> Reading:
        return Reading(rng, location, self.test_fraction, self.features)


def _lines(config: TextData, location: ConfigLocation) -> tuple[Path, list[Row]]:
    path = Path(config.path)
    if not path.is_file():
        raise location.error("path", path, "a file of JSON lines that exists")
    try:
        rows = [
            _parsed(line, n, config) for n, line in enumerate(read_lines(path), 1) if line.strip()
        ]
    except ValueError as error:
        raise location.error("path", path, f"valid JSON lines ({error})") from None
    if not rows:
        raise location.error("path", path, "a file with at least one line")
    return path, rows


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, gzipped or not; ValueError if it cannot be read."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8") as file:
                yield from file
        else:
            with path.open(encoding="utf-8") as file:
                yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"it cannot be read: {error}") from None


def _parsed(line: str, number: int, config: TextData) -> Row:
    try:
        row = json_value(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {getattr(error, 'msg', error)}") from None
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is not an object")
    for column in (*text_columns(config.text_column), config.label_column):
        if column not in row:
            raise ValueError(f"line {number} has no field {column!r}")
    for column in text_columns(config.text_column):
        if not isinstance(row[column], str):
            raise ValueError(f"line {number}: the field {column!r} is not a string")
    return row


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")


def _rows(
    lines: list[Row], config: TextData, location: ConfigLocation, with_domains: bool
) -> RawData:
    """Return the rows of lines, split by the field `split` if it names training and test rows.

    Rows of other splits are not used.
    """
    check_label_types([row[config.label_column] for row in lines])
    by_name: dict[object, list[Row]] = {}
    for row in lines:
        by_name.setdefault(row.get("split"), []).append(row)
    test = next((by_name[name] for name in _TEST_SPLITS if name in by_name), None)
    if test is None or "train" not in by_name:
        lines, test = by_name.get("train", by_name.get(None, lines)), None
    else:
        lines = by_name["train"]
    parts = [None if part is None else _part(part, config, location) for part in (lines, test)]
    names = sorted({str(row["domain"]) for row in lines}) if with_domains else ()
    assert parts[0] is not None
    return RawData(parts[0], parts[1], None, tuple(names))


def _part(lines: list[Row], config: TextData, location: ConfigLocation) -> RawRows:
    texts = [text_of(row, config.text_column) for row in lines]
    labels = np.array([row[config.label_column] for row in lines])
    domain = np.array([str(row.get("domain", "")) for row in lines])
    return RawRows(texts, labels, domain, _clients(lines, location.client_column))


def _clients(lines: list[Row], column: str | None) -> Array | None:
    if column is None:
        return None
    if not all(column in row for row in lines):
        raise ValueError(f"a row has no field {column!r} (clients.partition.name)")
    return np.array([str(row[column]) for row in lines])


def text_columns(column: str | Sequence[str]) -> tuple[str, ...]:
    """Return the columns of a text, or of a pair of texts."""
    return (column,) if isinstance(column, str) else tuple(column)


def text_of(row: Mapping[str, Any], column: str | Sequence[str]) -> TextRow:
    """Return the text of a row, or its pair of texts if there are two columns.

    Raises:
        ValueError: A value is not a string.

    """
    values = [row[name] for name in text_columns(column)]
    wrong = next((value for value in values if not isinstance(value, str)), None)
    if wrong is not None:
        raise ValueError(f"the column {column!r} holds {wrong!r}, not a string")
    return values[0] if len(values) == 1 else (values[0], values[1])


def check_label_types(labels: Sequence[object]) -> None:
    """Refuse labels that are neither all strings nor all integers; ValueError."""
    kinds = {type(label) for label in labels}
    if kinds not in ({str}, {int}):
        types = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"labels of type {types}, not all strings or all integers")
