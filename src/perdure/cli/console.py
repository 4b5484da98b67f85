"""Where words go: results to stdout, messages and mistakes to stderr."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.logging import RichHandler

_WIDE = 400
"""Columns where there is no terminal: a table in a file or a pipe is never cut."""


def stdout_console() -> Console:
    """The console for what a command was asked for."""
    plain = not sys.stdout.isatty()
    width = _WIDE if plain else None
    return Console(width=width, highlight=False, soft_wrap=plain, markup=False)


def print_error(kind: str, sentence: str) -> None:
    """One sentence on stderr."""
    sys.stderr.write(f"perdure: {kind}: {' '.join(sentence.split())}\n")


def setup_logging(quiet: bool = False) -> None:
    """Show the library's messages; quiet: only warnings."""
    logger = logging.getLogger("perdure")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(_handler())
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def _handler() -> logging.Handler:
    if sys.stderr.isatty():
        return RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("perdure: %(levelname)s: %(message)s"))
    return handler
