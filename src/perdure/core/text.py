"""Texts for people: arguments in messages, texts of others shown safely, docstrings of fields."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# ---- Arguments in messages as the caller writes them: `out='a'` in Python, `--out a` in a shell

_IN_SHELL: ContextVar[bool] = ContextVar("in_shell", default=False)


@contextmanager
def shell_spelling() -> Iterator[None]:
    """Spell arguments as options of a command for a while."""
    token = _IN_SHELL.set(True)
    try:
        yield
    finally:
        _IN_SHELL.reset(token)


def argument(name: str, value: object = None, option: str | None = None) -> str:
    """Return an argument as the caller writes it.

    Example:
        >>> argument("out", "runs/a"), argument("resume", True)
        ("out='runs/a'", 'resume=True')
        >>> with shell_spelling():
        ...     argument("out", "runs/a"), argument("resume", True)
        ('--out runs/a', '--resume')
    """
    if _IN_SHELL.get():
        spelled = option or f"--{name.replace('_', '-')}"
        return spelled if value is None or value is True else f"{spelled} {value}"
    if value is None:
        return name
    return f"{name}={value if isinstance(value, bool | int | float) else repr(str(value))}"


# ---- Texts of others on a terminal and in a table: shown, never obeyed

_ALLOWED = "\n\t"
_FORMULA = ("=", "+", "-", "@", "\t", "\n")
"""First characters by which spreadsheets take a cell for a formula."""


def printable(text: str) -> str:
    r"""Return a text with characters that a terminal obeys as their escapes.

    These are control characters, such as the beginning of a color or of a command that moves the
    cursor, and those that change the direction of writing.

    Example:
        >>> print(printable("a\x1b[31mb"))
        a\x1b[31mb

    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _ALLOWED else _escaped(c) for c in text)


def json_printable(document: str) -> str:
    """Return a JSON text in which such characters are escaped as JSON does."""
    if document.isprintable():
        return document
    return "".join(c if c.isprintable() or c in _ALLOWED else json.dumps(c)[1:-1] for c in document)


def csv_text(text: str) -> str:
    """Return the text of a CSV cell with a leading ' if a spreadsheet would take it for a formula.

    What a terminal would obey is escaped, and so is a carriage return, which readers would take for
    the end of the row.

    Example:
        >>> csv_text("=1+1"), csv_text("cat")
        ("'=1+1", 'cat')
    """
    text = printable(text)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode()


# ---- Docstrings of attributes: the string below a field, which describes it


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
