"""Checkpoints: the whole state of a run, one file each, of which the last good one wins.

A file's name carries its number and the hash of its bytes, so one rename publishes both and a
truncated or altered file gives itself away. Nothing is pickled.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from perdure.core.encoding import SUFFIX, decode, encode
from perdure.core.files import hash_name, read_hashed, remove_temporaries, write_atomic
from perdure.core.trees import Tree

_log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{8,})-[0-9a-f]{32}" + re.escape(SUFFIX))


def save(folder: Path, number: int, tree: Tree) -> Path:
    """Publish a checkpoint.

    Other files with this number or a later one are then removed: they are of a future that the
    run left when it went back to an earlier checkpoint. Keys that are not text come back as text,
    tuples as lists.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = encode(tree)
    path = folder / hash_name(number, data, SUFFIX)
    write_atomic(path, data)
    for other in paths(folder):
        if other != path and _number(other) >= number:
            other.unlink(missing_ok=True)
    return path


def latest(
    folder: Path, check: Callable[[Tree], None] = lambda tree: None
) -> tuple[int, Tree] | None:
    """The newest good checkpoint, or None. Bad ones are named in the log and passed over.

    check: raises ValueError or OSError if something that a checkpoint needs is not there.
    """
    for path in paths(folder):
        try:
            tree = read(path)
            check(tree)
            return _number(path), tree
        except (OSError, ValueError) as error:
            _log.warning("checkpoint %s is passed over: %s", path, error)
    return None


def read(path: Path) -> Tree:
    """One checkpoint; ValueError if it is truncated, altered or unreadable."""
    return decode(read_hashed(path))


def paths(folder: Path) -> list[Path]:
    """The checkpoints there are, good or not, newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (_number(path), path.stat().st_mtime_ns), reverse=True)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what killed writers left."""
    for path in paths(folder)[keep:]:
        path.unlink(missing_ok=True)
    remove_temporaries(folder)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])
