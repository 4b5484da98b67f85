"""The checkpoints of a run directory: those of the last rounds, and one per finished task.

checkpoints/ holds the newest checkpoints, checkpoints/tasks/ the one after each of the last
tasks that were finished. A file of the latter is a second name of the former's, if both exist.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from perdure.core.files import sync
from perdure.core.trees import Tree
from perdure.runs import checkpoint


class CheckpointFiles:
    """The checkpoints of one run.

    Args:
        folder: The folder checkpoints/ of the run directory.
        keep: Number of checkpoints of rounds that are kept.
        keep_tasks: Number of finished tasks whose checkpoints are kept.
    """

    def __init__(self, folder: Path, keep: int = 2, keep_tasks: int = 0) -> None:
        self.folder, self.tasks = folder, folder / "tasks"
        self._keep, self._keep_tasks = keep, keep_tasks
        self._manifests: dict[Path, Tree] = {}
        """The client state files that each checkpoint on disk refers to."""

    def save(self, number: int, tree: Tree) -> None:
        """Write a checkpoint, and delete those that are no longer kept.

        Args:
            number: The number of the checkpoint; see `RunState.checkpoint_number`.
            tree: Its content.
        """
        path = checkpoint.save(self.folder, number, tree)
        checkpoint.prune(self.folder, self._keep)
        self._manifests[path] = tree["clients"]
        self._keep_task(path, tree)

    def clean(self, path: Path, tree: Tree) -> None:
        """Do for the resumed checkpoint what a killed process may not have done after it."""
        newest = checkpoint.paths(self.folder)
        skipped = newest.index(path) if path in newest else len(newest)
        checkpoint.prune(self.folder, skipped + self._keep)
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
        for other in checkpoint.paths(self.tasks):
            if other != kept and checkpoint.number_of(other) >= task:
                other.unlink(missing_ok=True)
        checkpoint.prune(self.tasks, self._keep_tasks)
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
        return [*checkpoint.paths(self.folder), *checkpoint.paths(self.tasks)]

    def kept_tasks(self) -> dict[int, Path]:
        """Return the checkpoint after each task that is kept, by the number of finished tasks."""
        return {checkpoint.number_of(path): path for path in reversed(checkpoint.paths(self.tasks))}

    def drop_after(self, tasks: int) -> None:
        """Delete the checkpoints that were made after so many tasks were finished.

        If the checkpoint at that point is only kept by its task, it becomes the newest one.
        """
        for path, tree in list(self._readable()):
            at = (tree["state"]["task"], tree["state"]["round"])
            if at > (tasks, 0):
                path.unlink(missing_ok=True)
        kept = self.kept_tasks().get(tasks)
        if kept is not None and not checkpoint.paths(self.folder):
            tree = checkpoint.read(kept)
            rounds = tree["state"]["counters"]["rounds"]
            _link(kept, self.folder / f"{rounds + tasks:08d}-{kept.name.partition('-')[2]}")

    def _readable(self) -> Iterator[tuple[Path, Tree]]:
        for path in self.paths():
            try:
                yield path, checkpoint.read(path)
            except (OSError, ValueError):
                continue  # checkpoint.latest logs it


def _manifest(path: Path) -> Tree:
    try:
        manifest: Tree = checkpoint.read(path)["clients"]
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
