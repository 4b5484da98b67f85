"""A file lock that lets one process at a time write in a folder."""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any


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
    fcntl, msvcrt = _module("fcntl"), _module("msvcrt")
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


def _module(name: str) -> Any:
    """Return a module of the standard library, or None if this platform lacks it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
