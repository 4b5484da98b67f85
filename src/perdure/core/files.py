"""Files that are complete or absent, whenever the process dies."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = ".tmp"
_NAME_DIGITS = 32


def write_atomic(path: Path, data: bytes, sync_folder: bool = True) -> None:
    """Write a file so that its name refers to all of the new bytes or to the old ones."""
    with atomic_file(path, sync_folder) as file:
        file.write(data)


@contextlib.contextmanager
def atomic_file(path: Path, sync_folder: bool = True) -> Iterator[BinaryIO]:
    """Open a file for writing that gets its name when the block ends, and never if it fails."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync_folder:
        sync(path.parent)


def sync(folder: Path) -> None:
    """Make renames in a folder survive a power cut. Does nothing where the platform cannot."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_temporaries(folder: Path) -> None:
    """Delete the temporary files of killed writers. Only the folder's owner may call this."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name.startswith(".") and name.endswith(_TEMPORARY):
            (folder / name).unlink(missing_ok=True)


def sha256(data: bytes) -> str:
    """Return the SHA-256 of some bytes in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex, reading it in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_name(number: int, data: bytes, suffix: str) -> str:
    """Return a file name with a number and the hash of the content, which `read_hashed` checks."""
    return f"{number:08d}-{sha256(data)[:_NAME_DIGITS]}{suffix}"


def read_hashed(path: Path) -> bytes:
    """Return the content of a file named by `hash_name`.

    Raises:
        ValueError: The content does not have the hash in the file's name.

    """
    data = path.read_bytes()
    if sha256(data)[:_NAME_DIGITS] != path.stem.rpartition("-")[2]:
        raise ValueError("its content does not match its hash: truncated or altered")
    return data
