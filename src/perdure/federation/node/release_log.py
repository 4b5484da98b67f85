"""What left a node: an append-only file with one line per reply, and its summary."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any

from perdure.contract.uploads import Each, Upload
from perdure.core.trees import Tree
from perdure.evaluation.evaluator import MODES
from perdure.federation.messages import NodeRequest
from perdure.privacy.chain import protection_of

LOG_NAME = "released.jsonl"
"""Name of the file in a node's folder."""
Entry = dict[str, Any]
"""One line of the log."""


@dataclass(frozen=True)
class ReleaseLog:
    """The log of everything that a node sent, which is written before a reply leaves the node."""

    path: Path
    """The file."""

    def add(self, entries: Iterable[Entry]) -> None:
        """Append entries, each with the time, and wait until they are on the disk."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        lines = [json.dumps({"time": now, **entry}) + "\n" for entry in entries]
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "rb+", buffering=0) as file:
            _write_all(file, _line_break(handle) + "".join(lines).encode())
            os.fsync(handle)

    def entries(self) -> list[Entry]:
        """Return all entries; lines that cannot be read are left out."""
        text = self.path.read_bytes() if self.path.is_file() else b""
        found = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [entry for entry in found if isinstance(entry, dict)]


def _line_break(handle: int) -> bytes:
    """Return a line break if the last line of a file was cut, as by a full disk."""
    size = os.fstat(handle).st_size
    return b"\n" if size and os.pread(handle, 1, size - 1) != b"\n" else b""


def _write_all(file: FileIO, data: bytes) -> None:
    """Write all of the data; the operating system may take a part and fail at the next."""
    while data:
        data = data[file.write(data) :]


def upload_entry(upload: Upload) -> Entry:
    """Return what the log says about the fields of an upload: kinds, shapes and bytes."""
    return {
        "fields": {
            name: {
                "type": "Each" if isinstance(field, Each) else "Sum",
                "shapes": {key: list(tensor.shape) for key, tensor in field.value.items()},
                "bytes": sum(tensor.nbytes for tensor in field.value.values()),
            }
            for name, field in upload.items()
        }
    }


def reply_entry(request: NodeRequest, content: Tree) -> Entry:
    """Return what the log says about a reply that has no uploads."""
    if request.kind == "announce":
        return {"rows": content["size"]}
    if request.kind == "evaluate":
        names = [*MODES, *request.counts]
        return {"tests": request.tasks, "tests_on": request.evaluates_on, "counts": names}
    return {"clients": request.clients}


@dataclass
class Released:
    """What left a node in one task of a run, by kind of request."""

    run: str
    task: int
    kind: str
    replies: int = 0
    """Replies that left the node."""
    repeated: int = 0
    """Replies that had left it before, byte by byte."""
    bytes: int = 0
    """Bytes of all replies."""
    fields: str = ""
    """Fields of uploads, with their sizes in one upload."""
    protection: str = ""
    """How uploads were protected: masked, noise, or none."""


def summarize(entries: Iterable[Entry]) -> list[Released]:
    """Return the summary of a log: one row per run, task and kind of request.

    Entries that were altered and cannot be read are left out.
    """
    rows: dict[tuple[str, int, str], Released] = {}
    for entry in entries:
        with contextlib.suppress(AttributeError, KeyError, OverflowError, TypeError, ValueError):
            one = _released(entry)
            key = one.run, one.task, one.kind
            rows[key] = _sum_of(rows[key], one) if key in rows else one
    return list(rows.values())


def _released(entry: Entry) -> Released:
    """Return the summary of one entry."""
    row = Released(str(entry.get("run")), int(entry.get("task", 0)), str(entry.get("kind")))
    row.replies, row.repeated = 1, int(bool(entry.get("repeated")))
    row.bytes = int(entry.get("bytes", 0))
    if entry.get("fields"):
        sizes = {name: int(field["bytes"]) for name, field in entry["fields"].items()}
        row.fields = ", ".join(f"{name} ({size} bytes)" for name, size in sizes.items())
        row.protection = protection_of(entry)
    return row


def _sum_of(row: Released, later: Released) -> Released:
    """Return the counts of both, and what the later one says of fields, unless it has none."""
    return replace(
        later,
        replies=row.replies + later.replies,
        repeated=row.repeated + later.repeated,
        bytes=row.bytes + later.bytes,
        fields=later.fields or row.fields,
        protection=later.protection or row.protection,
    )
