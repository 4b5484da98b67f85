"""Texts of others on a terminal and in a table: shown, never obeyed."""

from __future__ import annotations

import json

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
