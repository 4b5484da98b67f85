"""Find run directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run directory, finished or not."""
    return (folder / "config.yaml").is_file()


def run_folders(path: Path) -> Iterator[Path]:
    """Yield the run directories at or below a folder, in the order of their names."""
    for folder, below, _ in os.walk(path):
        below.sort(key=_natural)
        if is_run(Path(folder)):
            below.clear()  # run directories are not nested
            yield Path(folder)


def _natural(name: str) -> tuple[str | int, ...]:
    """Return a sort key that compares numbers as numbers: seed-10 is after seed-2."""
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdigit() else (name, -1)
