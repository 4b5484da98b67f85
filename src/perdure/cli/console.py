"""Output that the commands share: tables and sentences, errors, Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from rich.text import Text

from perdure.core.errors import PerdureError, RunError
from perdure.core.text import json_printable, printable

# ---- Output of the commands: results to stdout, messages and errors to stderr

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


# ---- Results as tables and sentences; every number is named by its definition

Row = Sequence[float | None]


def table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table whose first column is text and whose other columns are numbers."""
    empty = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        empty.add_column(column, justify="right" if index else "left", no_wrap=True)
    return empty


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of text, whose last column is wrapped on a narrow terminal."""
    filled = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        filled.add_column(column, no_wrap=index < len(columns) - 1, overflow="fold")
    for row in rows:
        filled.add_row(*row)
    return filled


def number(value: float | None) -> str:
    """Return an accuracy as text, or a dash for None."""
    return "-" if value is None else f"{value:.3f}"


def matrix_table(title: str, matrix: Sequence[Row]) -> Table:
    """Return the table of the accuracy on each task (columns) after each task (rows)."""
    filled = table(title, ["after", *(f"task {j + 1}" for j in range(len(matrix)))])
    for i, row in enumerate(matrix):
        filled.add_row(f"task {i + 1}", *("" if value is None else number(value) for value in row))
    return filled


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names in bold and their values, without a header."""
    filled = Table(box=None, show_header=False, pad_edge=False)
    filled.add_column(no_wrap=True, style="bold")
    filled.add_column()
    for name, value in rows:
        filled.add_row(name, value)
    return filled


# ---- Stopped and failed runs, and the command that resumes them


class Stopped(PerdureError):
    """Stopped by Ctrl-C; the exit code is the usual one of shells."""

    exit_code = 130


@contextmanager
def resumable(out: Path, command: Sequence[str]) -> Iterator[None]:
    """Report how to resume a run that is stopped or fails, if something was written."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(_outcome(out, command)) from None
    except RunError as error:
        if not error.can_resume:
            raise
        raise RunError(f"{error}; {_outcome(out, command)}") from None


@contextmanager
def stoppable(command: Sequence[str]) -> Iterator[None]:
    """Report how to resume when Ctrl-C stops several runs."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(resume_hint(command)) from None


def resume_hint(command: Sequence[str]) -> str:
    """Return the sentence that names the command to resume with."""
    return f"all finished rounds are saved; resume with: {shell_command(command)}"


def _outcome(out: Path, command: Sequence[str]) -> str:
    saved = (out / "config.yaml").is_file()
    return resume_hint(command) if saved else "nothing was written"


def shell_command(command: Sequence[str]) -> str:
    """Return a command as it is typed in a shell."""
    return subprocess.list2cmdline(command) if os.name == "nt" else shlex.join(command)
