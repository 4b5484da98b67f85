"""A hash of the content of data that was given in Python, and the data as bytes."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.core.given import object_name
from perdure.data.python_objects import Parts
from perdure.data.rows import Part, Rows


def data_kind(value: Any, rows: Rows | Parts) -> str:
    """Return the name of given data in a config: its type, and a hash of its content."""
    return object_name(type(value).__name__, fingerprint(rows))


def fingerprint(rows: Rows | Parts) -> str:
    """Return the SHA-256 of the content of rows, in hexadecimal."""
    content = hashlib.sha256()
    _update(content, rows)
    return content.hexdigest()


def _update(content: Any, value: Any) -> None:
    """Add a value to a hash: what it is, its size, and its content."""
    if isinstance(value, Rows | Part):
        for field in fields(value):
            content.update(f"|{field.name}".encode())
            _update(content, getattr(value, field.name))
    elif isinstance(value, dict):
        for name, item in value.items():
            content.update(f"|{name}".encode())
            _update(content, item)
    elif isinstance(value, Tensor | np.ndarray):
        array = value.numpy() if isinstance(value, Tensor) else value
        order = "first" if isinstance(value, Tensor) else "last"  # where the channels are
        content.update(f"|{order}|{array.dtype}|{array.shape}".encode())
        content.update(np.ascontiguousarray(array).tobytes())
    else:
        content.update(f"|{value!r}".encode())


def rows_to_tree(rows: Rows | Parts) -> Any:
    """Return rows as a tree of tensors and plain values, which `core.encoding` can store."""
    if isinstance(rows, dict):
        return {"parts": [[name, rows_to_tree(part)] for name, part in rows.items()]}
    return {field.name: _plain(getattr(rows, field.name)) for field in fields(rows)}


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if not isinstance(value, np.ndarray):
        return value
    return {"strings": value.tolist()} if value.dtype.kind in "US" else {"array": _tensor(value)}


def _tensor(value: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(value))


def rows_from_tree(tree: Any) -> Rows | Parts:
    """Return the rows that `rows_to_tree` made a tree of, after it was stored."""
    if "parts" in tree:
        parts = {name: rows_from_tree(part) for name, part in tree["parts"]}
        return {name: part for name, part in parts.items() if isinstance(part, Rows)}
    test = None if tree["test"] is None else _part(tree["test"])
    classes, features = (_names(tree[name]) for name in ("class_names", "feature_names"))
    return Rows(_part(tree["train"]), test, classes, tuple(tree["domain_names"]), features)


def _names(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _part(tree: Any) -> Part:
    values = {name: _value(value) for name, value in tree.items()}
    if isinstance(values["x"], list):  # pairs have become lists
        values["x"] = [text if isinstance(text, str) else tuple(text) for text in values["x"]]
    return Part(**values)


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return np.array(value["strings"]) if "strings" in value else value["array"].numpy()
