"""Checkpoints: the whole state of a run, one file per checkpoint.

A file's name contains the checkpoint's number and the hash of its content, so that one rename
publishes both and a truncated or altered file is recognized. Nothing is pickled.
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
    """Write a checkpoint and return its path.

    Other checkpoints with this number or a larger one are then deleted: they are left over from
    before the run was resumed at an earlier checkpoint.

    Args:
        folder: The folder of the checkpoints, created if it does not exist.
        number: The number of the checkpoint, larger than those of earlier ones.
        tree: The state. Keys are restored as strings, tuples as lists.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = encode(tree)
    path = folder / hash_name(number, data, SUFFIX)
    write_atomic(path, data)
    for other in paths(folder):
        if other != path and number_of(other) >= number:
            other.unlink(missing_ok=True)
    return path


def latest(
    folder: Path, check: Callable[[Tree], None] = lambda tree: None
) -> tuple[Path, Tree] | None:
    """Return the path and the tree of the newest valid checkpoint, or None if there is none.

    Invalid checkpoints are logged and skipped.

    Args:
        folder: The folder of the checkpoints.
        check: Called with the tree of a readable checkpoint; raises ValueError or OSError if a
            file that it refers to is missing or altered.
    """
    for path in paths(folder):
        try:
            tree = read(path)
            check(tree)
            return path, tree
        except (OSError, ValueError) as error:
            _log.warning("checkpoint %s is skipped: %s", path, error)
    return None


def read(path: Path) -> Tree:
    """Return the tree of one checkpoint.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is truncated or altered.
    """
    return decode(read_hashed(path))


def paths(folder: Path) -> list[Path]:
    """Return the paths of all checkpoints, valid or not, newest first."""
    if not folder.is_dir():
        return []
    files = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(files, key=lambda path: (number_of(path), path.stat().st_mtime_ns), reverse=True)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and temporary files of killed processes."""
    for path in paths(folder)[keep:]:
        path.unlink(missing_ok=True)
    remove_temporaries(folder)


def number_of(path: Path) -> int:
    """Return the number in the name of a checkpoint."""
    return int(path.name.partition("-")[0])
