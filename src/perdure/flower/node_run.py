"""A node's folder for one run: the config that it accepted, and what its clients store."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from perdure.core.errors import bad_value
from perdure.core.files import sha256, write_atomic
from perdure.flower.protocol import BadMessage
from perdure.runs.lock import FileLock, LockHeld

_CONFIG, _ENDED, _TASK, _LOCK = "config.sha256", "ended", "task", ".lock"
RUN_NAME = re.compile("[0-9a-f]{32}")
"""Names of runs, and of their folders."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class NodeRun:
    """A run on a node. Only the owner of the node can read its folder."""

    folder: Path
    """Where the node stores the states and secrets of its clients in this run."""

    def accept(self, config: str) -> None:
        """Bind the run to the first config that the server sent, and refuse any other.

        Args:
            config: The config as text.

        Raises:
            BadMessage: The run has ended on this node, or had another config.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        with self.serving():
            path, digest = self.folder / _CONFIG, sha256(config.encode())
            if not path.is_file():
                write_atomic(path, digest.encode("ascii"))
            elif path.read_text(encoding="ascii") != digest:
                raise BadMessage("the run has another config than the one that this node accepted")

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Keep other processes from serving requests of the run while the block runs.

        Two requests at once would not see what the other has sent.

        Raises:
            BadMessage: The run has ended on this node.
        """
        with _locked(self.folder):
            if (self.folder / _ENDED).is_file():
                raise BadMessage("the run has ended on this node")
            yield

    @property
    def current_task(self) -> int:
        """The last task that was announced, or -1."""
        path = self.folder / _TASK
        return int(path.read_text(encoding="ascii")) if path.is_file() else -1

    def start_task(self, task: int) -> None:
        """Store that a task was announced."""
        write_atomic(self.folder / _TASK, str(task).encode("ascii"))

    def end(self, keep: bool) -> None:
        """Refuse all further requests of the run, and delete what its clients stored.

        Args:
            keep: Whether what they stored stays.
        """
        write_atomic(self.folder / _ENDED, b"")
        if not keep:
            remove_state(self.folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait for the lock on the folder of a run, and hold it while the block runs."""
    lock = FileLock(folder / _LOCK)
    while True:
        try:
            lock.acquire()
            break
        except LockHeld:
            time.sleep(_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


def remove_state(folder: Path) -> int:
    """Delete what clients stored in a run, and return the bytes.

    Args:
        folder: The folder of the run. That it has ended stays on record, so that no server can
            start it again from the beginning.
    """
    removed = 0
    for path in folder.iterdir():
        if path.name not in (_ENDED, _CONFIG, _LOCK):
            is_folder = path.is_dir() and not path.is_symlink()
            files = path.rglob("*") if is_folder else [path]
            removed += sum(file.lstat().st_size for file in files if S_ISREG(file.lstat().st_mode))
            shutil.rmtree(path) if is_folder else path.unlink()
    return removed


def _end(folder: Path) -> int:
    """End a run, delete what its clients stored, and return the bytes."""
    with _locked(folder):
        write_atomic(folder / _ENDED, b"")
        return remove_state(folder)


def _is_run(path: Path) -> bool:
    """Return whether a path is the folder of a run, and not one that an owner put beside them."""
    return RUN_NAME.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def clean_state(state: Path, run: str | None, everything: bool) -> dict[str, int]:
    """Delete what clients stored in runs, and return the bytes by run.

    Args:
        state: The folder with one folder per run.
        run: The run. If None, all that have ended.
        everything: Also runs that have not ended, which then cannot be resumed.

    Raises:
        UserError: There is no such run, or it has not ended.
    """
    folders = {path.name: path for path in sorted(state.glob("*")) if _is_run(path)}
    if run is not None and run not in folders:
        raise bad_value("--run", run, f"a run in {state}: {', '.join(folders) or 'there is none'}")
    chosen = [folders[run]] if run is not None else list(folders.values())
    ended = [path for path in chosen if everything or (path / _ENDED).is_file()]
    if run is not None and not ended:
        raise bad_value("--run", run, "a run that has ended, or used with --all")
    sizes = {path.name: _end(path) for path in ended}
    return {name: size for name, size in sizes.items() if size or run is not None}
