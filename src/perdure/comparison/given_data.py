"""Data that is given in Python to a comparison, whose runs are separate processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from perdure.core.encoding import decode, encode
from perdure.core.errors import bad_value
from perdure.core.given import find_given, giving, is_object
from perdure.data.fingerprint import rows_from_tree, rows_to_tree
from perdure.execution.given_data import with_data

_FILES: dict[str, Path] = {}
"""Files with given data, by the name of the data."""


@contextmanager
def shared_data(values: dict[str, Any], data: Any, folder: Path | None) -> Iterator[dict[str, Any]]:
    """Yield the values of a config that names given data, which worker processes find meanwhile.

    Args:
        values: The config as plain values.
        data: The data. If None, the values are yielded unchanged.
        folder: Where files with custom classes are looked up.
    """
    if data is None:
        yield values
        return
    with with_data(values, data, folder) as config:
        source, stream = config.data.source, values.get("stream") or {}
        stream = {"kind": config.stream.kind, "tasks": config.stream.tasks, **stream}
        named = {**values, "data": {**(values.get("data") or {}), "source": source}}
        with _stored(source):
            yield {**named, "stream": stream}


@contextmanager
def _stored(source: str) -> Iterator[None]:
    """Store given data in a temporary file."""
    if not is_object(source):
        if "<" in source or source.startswith("__main__."):
            raise bad_value("data", source, "a function that other processes can import")
        yield
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "data.safetensors"
        file.write_bytes(encode(rows_to_tree(find_given(source))))
        _FILES[source] = file
        try:
            yield
        finally:
            del _FILES[source]


def data_file(source: str) -> str | None:
    """Return the file with the given data of a name, or None if there is none."""
    return str(_FILES[source]) if source in _FILES else None


@contextmanager
def stored_data(source: str, file: str | None) -> Iterator[None]:
    """Let the data in a file be found under its name."""
    if file is None:
        yield
        return
    with giving(source, rows_from_tree(decode(Path(file).read_bytes()))):
        yield
