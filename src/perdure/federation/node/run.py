"""A node's folder for one run: the config that it accepted, what is stored, and what it sent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from stat import S_ISREG
from typing import Any

from perdure.contract.uploads import Each, Upload
from perdure.core.errors import bad_value
from perdure.core.files import hash_name, read_hashed, remove_temporaries, sha256, write_atomic
from perdure.core.trees import SUFFIX, Tree, decode, encode
from perdure.evaluation.evaluator import MODES
from perdure.federation.messages import BadMessage, NodeRequest
from perdure.privacy.chain import protection_of
from perdure.runs.directory import FileLock, LockHeld

# ---- The states of a node's clients, by the position in the run at which they were stored
#
# A server that is restarted resumes from its last checkpoint and repeats the rounds after it. The
# node then needs the states of that time, so it keeps the last few.

_NAME = re.compile(r"(\d{8,})-[0-9a-f]{32}" + re.escape(SUFFIX))


class ClientStateHistory:
    """The last states of a node's clients in one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Use a folder of the node."""
        self._folder, self._keep = folder, keep

    def get(self, client: int, sequence_number: int) -> Tree:
        """Return the last state that a client stored before a position; empty if there is none.

        States of this position or later are deleted: the run went back to before them.
        """
        earlier = []
        for path in self._paths(client):
            if _sequence_number(path) < sequence_number:
                earlier.append(path)
            else:
                path.unlink(missing_ok=True)
        return decode(read_hashed(earlier[-1])) if earlier else {}

    def put(self, client: int, sequence_number: int, tree: Tree) -> None:
        """Store the state of a client at a position, and delete all but the last few."""
        folder = self._client_folder(client)
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporaries(folder)
        data = encode(tree)
        write_atomic(folder / hash_name(sequence_number, data, SUFFIX), data)
        for old in self._paths(client)[: -self._keep]:
            old.unlink(missing_ok=True)

    def _client_folder(self, client: int) -> Path:
        return self._folder / f"client-{client}"

    def _paths(self, client: int) -> list[Path]:
        folder = self._client_folder(client)
        paths = folder.iterdir() if folder.is_dir() else ()
        return sorted((p for p in paths if _NAME.fullmatch(p.name)), key=_sequence_number)


def _sequence_number(path: Path) -> int:
    return int(path.name.partition("-")[0])


# ---- The protected replies that a node sent, to send them again byte by byte
#
# A server that resumes from a checkpoint repeats requests. If the node drew new noise, or a new
# sketch, the mean of its replies would tell more than one of them. So a request that was served is
# answered with the same bytes; only another request is a new release, which is counted. Old replies
# are deleted, and empty files are left of them, so that the repetition of an old request is
# refused.

MOST_RELEASES = 10
"""Most replies of a node at one place of a run, since the mean of many has no noise. An honest
server asks for another one at most each time it resumes."""
_REPLY_NAME = re.compile(r"(\d{8,})-([0-9a-f]{32})")


@dataclass(frozen=True)
class SentReplies:
    """The protected replies of a node in one run, by the request."""

    folder: Path
    """Where they are stored."""
    keep: int
    """Number of positions of the run whose replies are stored."""

    def get(self, request: NodeRequest, body: bytes) -> bytes | None:
        """Return the reply to a request that was served before, or None.

        Raises:
            BadMessage: The reply was deleted.

        """
        path = self._path(request, body)
        reply = path.read_bytes() if path.is_file() else None
        if reply == b"":
            raise BadMessage("the run is past this request, whose reply was deleted")
        return reply

    def put(self, request: NodeRequest, body: bytes, reply: bytes) -> None:
        """Store a reply before it leaves the node, and empty those of old positions."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_temporaries(self.folder)
        write_atomic(self._path(request, body), reply)
        positions = sorted({number for number, _ in self._stored()})
        for number, path in self._stored():
            if number in positions[: -self.keep]:
                os.truncate(path, 0)  # that it was sent stays on record

    def others(self, request: NodeRequest, body: bytes) -> int:
        """Return how many replies to other requests, or deleted ones, are of this position."""
        number, path = request.position.sequence_number, self._path(request, body)
        return sum(stored == number and other != path for stored, other in self._stored())

    def _stored(self) -> list[tuple[int, Path]]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        matches = [(_REPLY_NAME.fullmatch(path.name), path) for path in paths]
        return [(int(match[1]), path) for match, path in matches if match]

    def _path(self, request: NodeRequest, body: bytes) -> Path:
        """Return the file for a request; further attempts at it are the same request."""
        digest = hashlib.sha256(f"{request.kind} {request.clients}".encode() + body)
        return self.folder / f"{request.position.sequence_number:08d}-{digest.hexdigest()[:32]}"


# ---- A node's folder for one run: the config that it accepted, and what its clients store

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
        """Refuse all further requests of the run, and delete what its clients stored."""
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
    """Delete what clients stored in a run, and return the bytes."""
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


# ---- What left a node: an append-only file with one line per reply, and its summary

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
