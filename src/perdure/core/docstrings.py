"""Docstrings of attributes: the string below a field, which describes it."""

from __future__ import annotations

import ast
import inspect
import textwrap


def attribute_docstrings(cls: type) -> dict[str, str]:
    """Return by name the strings below the fields of a class and of its bases.

    Classes whose source is not available have none.
    """
    docstrings: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        docstrings |= _own_docstrings(base)
    return docstrings


def _own_docstrings(cls: type) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        return {}
    body = ast.parse(source).body[0]
    if not isinstance(body, ast.ClassDef):
        return {}
    docstrings: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            text = _text(below)
            if text:
                docstrings[field.target.id] = inspect.cleandoc(text)
    return docstrings


def _text(node: ast.stmt) -> str | None:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    value = node.value.value if is_text else None  # type: ignore[attr-defined]
    return value if isinstance(value, str) else None
