"""Files that are there completely or not at all, whenever the process dies."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from pathlib import Path

_TEMPORARY = ".tmp"
_NAME_DIGITS = 32


def write_atomic(path: Path, data: bytes, sync_folder: bool = True) -> None:
    """Write a file so that its name shows either all of the new bytes or what was there before.

    Who writes many files may sync their folder once at the end (sync_folder=False, then sync).
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_TEMPORARY}")
    try:
        _write_through(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync_folder:
        sync(path.parent)


def _write_through(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make renames in a folder survive a power cut, where the platform can (Windows cannot)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_temporaries(folder: Path) -> None:
    """Delete what killed writers left behind; for the one process that owns the folder."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name.startswith(".") and name.endswith(_TEMPORARY):
            (folder / name).unlink(missing_ok=True)


def sha256(data: bytes) -> str:
    """The SHA-256 of some bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file in hex, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_name(number: int, data: bytes, suffix: str) -> str:
    """A file name with a number and the hash of the content, so that one rename tells both."""
    return f"{number:08d}-{sha256(data)[:_NAME_DIGITS]}{suffix}"


def read_hashed(path: Path) -> bytes:
    """The bytes of a file named by hash_name; ValueError if they are not what its name says."""
    data = path.read_bytes()
    if sha256(data)[:_NAME_DIGITS] != path.stem.rpartition("-")[2]:
        raise ValueError("its content is not what its hash says: truncated or altered")
    return data
