"""The protected replies that a node sent, to send them again byte by byte.

A server that resumes from a checkpoint repeats requests. If the node drew new noise, or a new
sketch, the mean of its replies would tell more than one of them. So a request that was served is
answered with the same bytes; only another request is a new release, which is counted. Old replies
are deleted, and empty files are left of them, so that the repetition of an old request is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from perdure.core.files import remove_temporaries, write_atomic
from perdure.flower.protocol import BadMessage, NodeRequest

MOST_RELEASES = 10
"""Most replies of a node at one place of a run, since the mean of many has no noise. An honest
server asks for another one at most each time it resumes."""
_NAME = re.compile(r"(\d{8,})-([0-9a-f]{32})")


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
        matches = [(_NAME.fullmatch(path.name), path) for path in paths]
        return [(int(match[1]), path) for match, path in matches if match]

    def _path(self, request: NodeRequest, body: bytes) -> Path:
        """Return the file for a request; further attempts at it are the same request."""
        digest = hashlib.sha256(f"{request.kind} {request.clients}".encode() + body)
        return self.folder / f"{request.position.sequence_number:08d}-{digest.hexdigest()[:32]}"
