"""Checkpoints: the whole state of a run, those of the last rounds, and one per finished task."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from perdure.core.files import hash_name, read_hashed, remove_temporaries, sync, write_atomic
from perdure.core.trees import SUFFIX, Tree, decode, encode

# ---- Checkpoints: the whole state of a run, one file per checkpoint
#
# A file's name contains the checkpoint's number and the hash of its content, so that one rename
# publishes both and a truncated or altered file is recognized. Nothing is pickled.

_log = logging.getLogger(__name__)
_NAME = re.compile(r"(\d{8,})-[0-9a-f]{32}" + re.escape(SUFFIX))


def save(folder: Path, number: int, tree: Tree) -> Path:
    """Write a checkpoint and return its path.

    Other checkpoints with this number or a larger one are then deleted: they are left over from
    before the run was resumed at an earlier checkpoint.
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


# ---- The checkpoints of a run directory: those of the last rounds, and one per finished task
#
# checkpoints/ holds the newest checkpoints, checkpoints/tasks/ the one after each of the last
# tasks that were finished. A file of the latter is a second name of the former's, if both exist.


class CheckpointFiles:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int = 2, keep_tasks: int = 0) -> None:
        self.folder, self.tasks = folder, folder / "tasks"
        self._keep, self._keep_tasks = keep, keep_tasks
        self._manifests: dict[Path, Tree] = {}
        """The client state files that each checkpoint on disk refers to."""

    def save(self, number: int, tree: Tree) -> None:
        """Write a checkpoint, and delete those that are no longer kept."""
        path = save(self.folder, number, tree)
        prune(self.folder, self._keep)
        self._manifests[path] = tree["clients"]
        self._keep_task(path, tree)

    def clean(self, path: Path, tree: Tree) -> None:
        """Do for the resumed checkpoint what a killed process may not have done after it."""
        newest = paths(self.folder)
        skipped = newest.index(path) if path in newest else len(newest)
        prune(self.folder, skipped + self._keep)
        self._keep_task(path, tree)

    def _keep_task(self, path: Path, tree: Tree) -> None:
        """Keep a checkpoint under a second name if a task has just been finished."""
        task, in_task = tree["state"]["task"], tree["state"]["round"]
        if in_task or not task or not self._keep_tasks:
            return
        self.tasks.mkdir(exist_ok=True)
        kept = self.tasks / f"{task:08d}-{path.name.partition('-')[2]}"
        if not kept.exists():
            _link(path, kept)
        for other in paths(self.tasks):
            if other != kept and number_of(other) >= task:
                other.unlink(missing_ok=True)
        prune(self.tasks, self._keep_tasks)
        self._manifests[kept] = tree["clients"]

    def manifests(self) -> list[Tree]:
        """Return the client state files that the checkpoints on disk refer to."""
        paths = self.paths()
        for path in paths:
            if path not in self._manifests:
                self._manifests[path] = _manifest(path)
        self._manifests = {path: self._manifests[path] for path in paths}
        return [manifest for manifest in self._manifests.values() if manifest]

    def paths(self) -> list[Path]:
        """Return the paths of all checkpoints."""
        return [*paths(self.folder), *paths(self.tasks)]

    def kept_tasks(self) -> dict[int, Path]:
        """Return the checkpoint after each task that is kept, by the number of finished tasks."""
        return {number_of(path): path for path in reversed(paths(self.tasks))}

    def drop_after(self, tasks: int) -> None:
        """Delete the checkpoints that were made after so many tasks were finished.

        If the checkpoint at that point is only kept by its task, it becomes the newest one.
        """
        for path, tree in list(self._readable()):
            at = (tree["state"]["task"], tree["state"]["round"])
            if at > (tasks, 0):
                path.unlink(missing_ok=True)
        kept = self.kept_tasks().get(tasks)
        if kept is not None and not paths(self.folder):
            tree = read(kept)
            rounds = tree["state"]["counters"]["rounds"]
            _link(kept, self.folder / f"{rounds + tasks:08d}-{kept.name.partition('-')[2]}")

    def _readable(self) -> Iterator[tuple[Path, Tree]]:
        for path in self.paths():
            try:
                yield path, read(path)
            except (OSError, ValueError):
                continue  # checkpoint.latest logs it


def _manifest(path: Path) -> Tree:
    try:
        manifest: Tree = read(path)["clients"]
        return manifest
    except (OSError, ValueError):
        return {}


def _link(path: Path, name: Path) -> None:
    """Give a file a second name; copy it where the file system has no links."""
    temporary = name.with_name(f".{name.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
    os.replace(temporary, name)
    sync(name.parent)
