"""The protected replies that a node sent, to send them again byte by byte.

A server that resumes from a checkpoint repeats requests. If the node drew new noise, or a new
sketch, the mean of its replies would tell more than one of them. So a request that was served is
answered with the same bytes; only another request is a new release, which is counted. Old replies
are deleted, and what is left of them is an empty file, so that they are counted for ever.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from perdure.core.files import remove_temporaries, write_atomic
from perdure.flower.protocol import NodeRequest

MOST_RELEASES = 100
"""Most replies of a node at one position of a run. A server that resumes once makes one more."""
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{32})")


@dataclass(frozen=True)
class SentReplies:
    """The protected replies of a node in one run, by the request."""

    folder: Path
    """Where they are stored."""
    keep: int
    """Number of positions of the run whose replies are stored."""

    def get(self, request: NodeRequest, body: bytes) -> bytes | None:
        """Return the reply to a request that was served before, or None."""
        path = self._path(request, body)
        return path.read_bytes() if path.is_file() else None

    def put(self, request: NodeRequest, body: bytes, reply: bytes) -> None:
        """Store a reply before it leaves the node, and delete those of old positions."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_temporaries(self.folder)
        write_atomic(self._path(request, body), reply)
        stored = [(number, path) for number, path in self._stored() if path.stat().st_size]
        last = sorted({number for number, _ in stored})[-self.keep :]
        for number, path in stored:
            if number not in last:
                self._forget(number, path)

    def _forget(self, number: int, path: Path) -> None:
        """Delete a reply, but not that there was one."""
        write_atomic(self.folder / f"{number:08d}-{uuid4().hex}", b"")
        path.unlink(missing_ok=True)

    def others(self, request: NodeRequest, body: bytes) -> int:
        """Return how many replies to other requests, or deleted ones, are of this position."""
        number, path = request.position.sequence_number, self._path(request, body)
        return sum(stored == number and other != path for stored, other in self._stored())

    def _stored(self) -> list[tuple[int, Path]]:
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        matches = [(_NAME.fullmatch(path.name), path) for path in paths]
        return [(int(match[1]), path) for match, path in matches if match]

    def _path(self, request: NodeRequest, body: bytes) -> Path:
        """Return the file for a request; further attempts at it are the same request."""
        digest = hashlib.sha256(f"{request.kind} {request.clients}".encode() + body)
        return self.folder / f"{request.position.sequence_number:08d}-{digest.hexdigest()[:32]}"
