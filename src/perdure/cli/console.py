"""Output of the commands: results to stdout, messages and errors to stderr."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from perdure.core.display import json_printable, printable

_WIDE = 400
"""Columns if stdout is no terminal: a table in a file or a pipe is never cut."""


class PrintableConsole(Console):
    """A console that shows control characters of texts, such as class names, as escapes."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text for output; rich calls this for every string, also for cells of tables."""
        return super().render_str(printable(text), **options)


class PrintableFormatter(logging.Formatter):
    """Formats messages of the library likewise."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a message."""
        return printable(super().format(record))


def stdout_console() -> Console:
    """Return a console for results."""
    plain = not sys.stdout.isatty()
    width = _WIDE if plain else None
    return PrintableConsole(width=width, highlight=False, soft_wrap=plain, markup=False)


def print_json(document: Any) -> None:
    """Print one JSON document to stdout, for `--json`."""
    sys.stdout.write(json_printable(json.dumps(document, indent=2, ensure_ascii=False)) + "\n")


def print_error(kind: str, sentence: str) -> None:
    """Print one sentence to stderr; `kind` is error, warning or stopped."""
    sys.stderr.write(f"perdure: {kind}: {printable(' '.join(sentence.split()))}\n")


def setup_logging(quiet: bool = False) -> None:
    """Show the messages of the library on stderr; if `quiet`, only warnings."""
    logger = logging.getLogger("perdure")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(_handler())
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def _handler() -> logging.Handler:
    if sys.stderr.isatty():
        rich = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
        rich.setFormatter(PrintableFormatter("%(message)s"))
        return rich
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("perdure: %(levelname)s: %(message)s"))
    return handler
