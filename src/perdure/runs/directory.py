"""The run directory: all files of a run, the lock of its process, and the search for runs."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perdure.config import Config, dump_saved, load_saved
from perdure.config.sentences import flatten_keys
from perdure.core.documents import json_value
from perdure.core.errors import InUse, UserError, bad_value
from perdure.core.event_log import EVENTS, read_events
from perdure.core.files import remove_temporaries, write_atomic
from perdure.core.text import argument
from perdure.methods.registry import fill_defaults, is_builtin

# ---- Delete the run in a directory, so that another can take its place. Other files stay

_CONTENT = (
    "result.json", "report.html", "model", "checkpoints", "clients", "events.jsonl", "sums.jsonl",
    "draws.txt", "tensorboard", "mlflow.json", "method", "config.yaml",
)  # fmt: skip
"""What a run consists of, in the order of deletion: without its config it would be no run."""


def check_overwritable(path: Path) -> None:
    """Refuse to delete what may not be a run: the whole of a run has a config and a lock.

    Raises:
        UserError: The directory is a link, holds a federation, or was not written by a run.

    """
    reason = _reason(path)
    if reason is not None:
        option = argument("overwrite", True)
        raise UserError(f"{option}: must be given for a run directory, got {path}, {reason}")


def _reason(path: Path) -> str | None:
    if path.is_symlink():
        return "which is a link"
    if (path / "federation").exists():
        return "which holds a federation"
    for name in ("config.yaml", ".lock"):
        if (path / name).is_symlink() or not (path / name).is_file():
            return f"whose {name} is not a file of a run"
    try:
        load_saved(path / "config.yaml")
    except UserError:
        return "whose config.yaml is not that of a run"
    return None


def delete_run(path: Path) -> None:
    """Delete the run in a directory, whose lock this process holds; links are not followed."""
    for name in _CONTENT:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


# ---- A file lock that lets one process at a time write in a folder


class LockHeld(Exception):
    """Another process holds the lock."""


class FileLock:
    """An exclusive lock on a file, which the operating system releases when the holder dies.

    The file stays when the lock is released, since deleting it would race with the next holder.
    It contains the process id of the holder, for error messages.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def acquire(self) -> None:
        """Take the lock; raise LockHeld at once if another process holds it."""
        no_links = getattr(os, "O_NOFOLLOW", 0)  # the file that a link names would be emptied
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | no_links, 0o644)
        try:
            _lock(handle)
        except BlockingIOError:
            os.close(handle)
            raise LockHeld from None
        self._handle = handle
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def holder(self) -> str:
        """Return the process id of the holder, or "unknown"."""
        with contextlib.suppress(OSError):
            return self.path.read_text(encoding="ascii").strip() or "unknown"
        return "unknown"


def _lock(handle: int) -> None:
    """Lock an open file, or raise BlockingIOError. File systems without locks are accepted."""
    fcntl, msvcrt = lock_module("fcntl"), lock_module("msvcrt")
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return
    elif msvcrt is not None:
        _lock_windows(msvcrt, handle)


def _lock_windows(msvcrt: Any, handle: int) -> None:
    # Windows lets nobody read locked bytes: lock one far behind the process id.
    os.lseek(handle, 1 << 20, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except OSError as error:
        raise BlockingIOError from error
    finally:
        os.lseek(handle, 0, os.SEEK_SET)


def lock_module(name: str) -> Any:
    """Return a module of the standard library, or None if this platform lacks it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# ---- Find run directories


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


# ---- The run directory: all files of a run, and the lock of the process that writes them

_log = logging.getLogger(__name__)
_RUN_CONTENT = ("config.yaml", "events.jsonl", "result.json", "checkpoints", "clients", "model")


class RunDirectory:
    """The directory of one run.

    It contains config.yaml, events.jsonl, result.json, checkpoints/, clients/ (client states),
    model/ and, in a federation with secure aggregation, sums.jsonl (the sums that were asked for),
    or draws.txt (where the server drew noise).
    Use `RunDirectory.create` to write (it takes the lock) and `RunDirectory.open` to read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.clients = self.path / "clients"
        self.model = self.path / "model"
        self._config = self.path / "config.yaml"
        self._events = self.path / EVENTS
        self._result = self.path / "result.json"
        self._lock = FileLock(self.path / ".lock")

    @classmethod
    def create(
        cls, path: str | Path, config: Config, resume: bool, overwrite: bool = False
    ) -> RunDirectory:
        """Create a run directory, or reopen one, and take its lock.

        Raises:
            UserError: `path` cannot be used. Nothing was written.

        """
        run = cls(path)
        run._check(config, resume, overwrite)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run._take_lock()
            run._check(config, resume, overwrite)  # again: another process may have written here
            if overwrite and run._has_config():
                delete_run(run.path)
            if not run._has_config():
                write_atomic(run._config, dump_saved(config).encode())
            for folder in (run.path, run.model):
                remove_temporaries(folder)
        except OSError as error:
            run.close()
            where = argument("out", path)
            raise UserError(f"{where}: cannot be written ({error.strerror})") from None
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def reopen(cls, path: str | Path) -> RunDirectory:
        """Return an existing run directory and take its lock; UserError if it is in use."""
        run = cls.open(path)
        run._take_lock()
        return run

    def replace_config(self, config: Config) -> None:
        """Write another complete config, which the owner of the lock may do."""
        write_atomic(self._config, dump_saved(config).encode())

    @classmethod
    def check_can_create(cls, path: str | Path, config: Config, resume: bool) -> None:
        """Refuse what `create` would refuse, without writing anything; arguments as there."""
        cls(path)._check(config, resume)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Return an existing run directory for reading; UserError if it is none."""
        run = cls(path)
        if not run._has_config():
            raise UserError(f"{path}: not a run directory (it has no config.yaml)")
        return run

    def config(self, code: Path | None = None) -> Config:
        """Return the complete config of the run."""
        try:
            return load_saved(self._config, code)
        except UserError as error:
            message = str(error)
            if not message.startswith(str(self._config)):
                message = f"{self._config}: {message}"
            raise UserError(message) from None

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append_event(self, event: dict[str, Any]) -> None:
        """Append one line to events.jsonl, which survives if this process is killed next."""
        line = json.dumps(_json_value(event), allow_nan=False) + "\n"
        with self._events.open("ab") as file:
            file.write(line.encode())

    def events(self) -> list[dict[str, Any]]:
        """Return all events; an incomplete last line is left out."""
        return read_events(self._events)

    def events_size(self) -> int:
        """Return the size of events.jsonl in bytes, which a checkpoint stores."""
        return self._events.stat().st_size if self._events.is_file() else 0

    def truncate_events(self, size: int) -> None:
        """Shorten events.jsonl to a checkpoint's size, and remove an incomplete last line."""
        data = self._events.read_bytes() if self._events.is_file() else b""
        if len(data) < size:
            _log.warning("%s has lost lines: %d of %d bytes", self._events, len(data), size)
        complete = data[:size].rfind(b"\n") + 1
        if complete < len(data):
            os.truncate(self._events, complete)

    def save_result(self, result: dict[str, Any]) -> dict[str, Any]:
        """Write result.json atomically and return its content; infinities and NaN become null."""
        content: dict[str, Any] = _json_value(result)
        text = json.dumps(content, indent=2, allow_nan=False)
        write_atomic(self._result, (text + "\n").encode())
        return content

    def load_result(self) -> dict[str, Any]:
        """Return the content of result.json.

        Raises:
            UserError: The run is not finished, or the file is damaged.

        """
        try:
            result = json_value(self._result.read_bytes())
        except FileNotFoundError:
            raise UserError(f"{self.path}: has no result.json, the run is not finished") from None
        except (OSError, ValueError):
            raise UserError(f"{self._result}: cannot be read as JSON") from None
        if not isinstance(result, dict):
            raise UserError(f"{self._result}: must be an object, got {type(result).__name__}")
        return result

    def check_same_config(self, config: Config) -> None:
        """Refuse a complete config that differs from the run's; name the first such key."""
        run_values, values = (flatten_keys(_comparable(c)) for c in (self.config(), config))
        keys = [*values, *(key for key in run_values if key not in values)]
        if not is_builtin(config.method):  # a custom class may have gained fields since the run
            keys = [key for key in keys if key in run_values or not key.startswith("method.")]
        for key in keys:
            kept, new = run_values.get(key), values.get(key)
            if repr(kept) != repr(new):  # as strings, where NaN equals itself and 1 is not 1.0
                allowed = f"{kept!r} as in {self._config}, since a run is resumed with its config"
                raise bad_value(key, new, allowed)

    def _has_config(self) -> bool:
        return self._config.is_file()

    def _check(self, config: Config, resume: bool, overwrite: bool = False) -> None:
        """Refuse to resume another run, to overwrite what is none, or a path with files.

        (A lock alone is left by a run killed at once.)
        """
        if resume and self._has_config():
            self.check_same_config(config)
            return
        if overwrite and self._has_config():
            check_overwritable(self.path)
            return
        where, other = argument("out", self.path), f"another {argument('out')}"
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{where}: must be a directory, got a file")
        if self._has_config():
            options = f"{argument('resume', True)}, {argument('overwrite', True)}"
            raise UserError(f"{where}: already contains a run, use {options} or {other}")
        if resume and not self._lock.path.exists():
            where = argument("out", self.path, option="--resume")
            raise UserError(f"{where}: not a run directory (it has no config.yaml)")
        for name in _RUN_CONTENT:
            if (self.path / name).exists():
                raise UserError(f"{where}: already contains {name}, use {other}")

    def _take_lock(self) -> None:
        try:
            self._lock.acquire()
        except LockHeld:
            holder = self._lock.holder()
            where = argument("out", self.path)
            raise InUse(f"{where}: in use by process {holder}") from None


def _comparable(config: Config) -> dict[str, Any]:
    """Return the values of a config with the defaults of a built-in method filled in.

    A custom method is left unchanged, since its file must not be loaded here.
    """
    values = config.model_dump(mode="json")
    if is_builtin(values["method"]):
        values["method"] = fill_defaults(values["method"])
    return values


def _json_value(value: Any) -> Any:
    """Return a value that JSON can hold: numpy and torch scalars as numbers, NaN as None."""
    if isinstance(value, dict):
        return {str(key): _json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _json_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
