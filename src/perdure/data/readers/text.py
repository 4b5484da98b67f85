"""Texts in JSON lines, as hashed word counts."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.config import HuggingfaceData, TextData
from perdure.core.rng import Rng
from perdure.data.checks import check_classes, check_labels
from perdure.data.clients import with_clients
from perdure.data.source import ConfigLocation, Examples, Source
from perdure.data.subsets import stratified_split

Row = dict[str, Any]
_CHUNK = 4096
_TEST_SPLITS = ("test", "val", "validation")


def load_text(config: TextData, rng: Rng, location: ConfigLocation) -> Source:
    """Load a source from a file of JSON lines."""
    path, rows = _rows(config, location)
    return _checked_source(_stem(path), rows, None, config, rng, location, path)


def load_text_domains(config: TextData, rng: Rng, location: ConfigLocation) -> list[Source]:
    """Load one source per value of the field `domain`, in the order of their names."""
    path, rows = _rows(config, location)
    if not all("domain" in row for row in rows):
        raise location.error("path", path, "JSON lines that all have the field 'domain'")
    names = sorted({str(row["domain"]) for row in rows})
    try:
        classes = class_names([row[config.label_column] for row in rows])
    except ValueError as error:
        raise location.error("path", path, f"JSON lines with valid labels ({error})") from None
    return [
        _checked_source(
            name,
            [row for row in rows if str(row["domain"]) == name],
            classes,
            config,
            rng,
            replace(location, number=number),
            path,
        )
        for number, name in enumerate(names)
    ]


def _rows(config: TextData, location: ConfigLocation) -> tuple[Path, list[Row]]:
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
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}: {error.msg}") from None
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is not an object")
    for column in (config.text_column, config.label_column):
        if column not in row:
            raise ValueError(f"line {number} has no field {column!r}")
    if not isinstance(row[config.text_column], str):
        raise ValueError(f"line {number}: the field {config.text_column!r} is not a string")
    return row


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")


def _checked_source(
    name: str,
    rows: list[Row],
    classes: tuple[str, ...] | None,
    config: TextData,
    rng: Rng,
    location: ConfigLocation,
    path: Path,
) -> Source:
    try:
        train, test = _split(rows, config, rng, location)
        return text_source(name, train, test, classes, config, location.client_column)
    except ValueError as error:
        raise location.error("path", path, f"JSON lines with valid labels ({error})") from None


def _split(
    rows: list[Row], config: TextData, rng: Rng, location: ConfigLocation
) -> tuple[list[Row], list[Row]]:
    """Split by the field `split` if it names training and test rows, else with the seed.

    Rows of other splits are not used.
    """
    by_name: dict[object, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.get("split"), []).append(row)
    test = next((by_name[name] for name in _TEST_SPLITS if name in by_name), None)
    if test is not None and "train" in by_name:
        return by_name["train"], test
    rows = by_name.get("train", by_name.get(None, rows))
    return seeded_split(rows, config, rng, location)


def seeded_split(
    rows: list[Row], config: TextData, rng: Rng, location: ConfigLocation
) -> tuple[list[Row], list[Row]]:
    """Split rows with the seed into training and test, with the same fraction of every class."""
    labels = np.array([str(row[config.label_column]) for row in rows])
    train, test = stratified_split(
        labels, config.test_fraction, rng.numpy_generator("holdout", location.number)
    )
    return [rows[i] for i in train], [rows[i] for i in test]


def text_source(
    name: str,
    train: list[Row],
    test: list[Row],
    classes: tuple[str, ...] | None,
    config: TextData | HuggingfaceData,
    client_column: str | None = None,
) -> Source:
    """Return the source of rows with a text and a label.

    Args:
        name: Name of the source.
        train: Training rows.
        test: Test rows.
        classes: Names of the classes. If None, those that occur.
        config: The section with the names of the columns and the number of features.
        client_column: Column that names the client of a row. If None, clients are not named.

    Raises:
        ValueError: There are no rows, or labels are invalid.
    """
    if not train or not test:
        raise ValueError(f"{name} has no rows to {'test' if train else 'train'} on")
    names = classes or class_names([row[config.label_column] for row in (*train, *test)])
    texts = [[row[config.text_column] for row in rows] for rows in (train, test)]
    examples = [
        Examples(hash_words(strings, config.features), _labels(rows, names, config))
        for strings, rows in zip(texts, (train, test), strict=True)
    ]
    source = Source(name, examples[0], examples[1], names, (texts[0], texts[1]))
    if client_column is None:
        return source
    if not all(client_column in row for row in (*train, *test)):
        raise ValueError(f"a row has no field {client_column!r} (clients.partition.name)")
    clients = [[str(row[client_column]) for row in rows] for rows in (train, test)]
    return with_clients(source, clients[0], clients[1])


def class_names(labels: Sequence[object]) -> tuple[str, ...]:
    """Return the names of the classes: strings sorted, or integers from 0."""
    if all(isinstance(label, str) for label in labels):
        return tuple(sorted({str(label) for label in labels}))
    kinds = {type(label) for label in labels}
    if kinds != {int}:
        types = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"labels of type {types}, not all strings or all integers")
    numbers = np.array(labels, np.int64)
    check_labels(numbers, len(numbers), "the label field")
    return check_classes(numbers, numbers, None)


def _labels(rows: list[Row], names: tuple[str, ...], config: TextData | HuggingfaceData) -> Tensor:
    labels = {name: label for label, name in enumerate(names)}
    return torch.tensor([labels[str(row[config.label_column])] for row in rows])


def hash_words(texts: Sequence[str], features: int) -> Tensor:
    """Return word counts by hash, uint8 [N, features].

    Args:
        texts: The texts.
        features: Number of hash values. Words with the same one are counted together.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    words = HashingVectorizer(n_features=features, norm=None, alternate_sign=False)
    out = np.empty((len(texts), features), np.uint8)
    for start in range(0, len(texts), _CHUNK):
        counts = words.transform(texts[start : start + _CHUNK]).toarray()
        out[start : start + _CHUNK] = counts.clip(0, 255)
    return torch.from_numpy(out)
