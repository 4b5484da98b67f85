"""Where a real server drew noise for sums, for the accounting.

A server that resumes from a checkpoint repeats rounds. Nodes may have received the models that it
made before, and the noise of the repeated sums is new: each draw is one more sum.
"""

from __future__ import annotations

import os
from pathlib import Path

Position = tuple[int, int, int]
"""Task, round and exchange."""


class NoiseDraws:
    """The draws of the server of one run; in memory, until `store_in` is called."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._drawn: list[str] = []

    def store_in(self, path: Path) -> None:
        """Read the draws of a file, to which all further ones are appended."""
        text = path.read_text("ascii", "replace") if path.is_file() else ""
        self._drawn = text.split("\n")[1:]  # every line begins with a line break
        self._path = path

    def add(self, position: Position) -> None:
        """Store a draw before its sum is used, and wait until it is on the disk."""
        line = " ".join(map(str, position))
        self._drawn.append(line)
        if self._path is None:
            return
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"\n{line}")  # begins a line even if a process died while it wrote one
            file.flush()
            os.fsync(file.fileno())

    @property
    def repeated(self) -> int:
        """The draws beyond one per round and exchange."""
        return len(self._drawn) - len(set(self._drawn))
