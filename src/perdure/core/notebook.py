"""What is shown in a notebook: tables as HTML, and a progress bar that needs no widgets."""

from __future__ import annotations

import html
import importlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

_SECONDS = 0.1
"""Least time between two changes of a bar."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML; all text is escaped."""
    titles = "".join(f'<th scope="col">{html.escape(title)}</th>' for title in head)
    body = "".join(_row(row) for row in rows)
    return (
        f'<table><caption style="text-align:left">{html.escape(caption)}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    )


def _row(cells: Sequence[str]) -> str:
    first, *others = (html.escape(cell) for cell in cells)
    inside = "".join(f'<td style="text-align:right">{cell}</td>' for cell in others)
    return f'<tr><th scope="row" style="text-align:left">{first}</th>{inside}</tr>'


class NotebookBar:
    """A progress bar in the output of a cell. It appears when it is first changed."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.done, self.total, self.note = 0, 1, ""
        self._handle: Any = None
        self._shown = 0.0

    def show(self, done: int, total: int | None, note: str) -> None:
        """Show how far the work is."""
        self.done, self.total, self.note = done, total or 0, note
        now = time.monotonic()
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").display(self, display_id=True)
        elif now - self._shown < _SECONDS and done != total:
            return
        else:
            self._handle.update(self)
        self._shown = now

    def __repr__(self) -> str:
        return f"{self.title}: {self.done} of {self.total or '?'} {self.note}".rstrip()

    def _repr_html_(self) -> str:
        value = f' value="{self.done}" max="{self.total}"' if self.total else ""
        return f"<progress{value}></progress> {html.escape(repr(self))}"
