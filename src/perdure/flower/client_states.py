"""What a node's clients keep between rounds, by the place in the run where they kept it.

A server that is restarted goes back to its last checkpoint and asks for the same rounds again. The
node then has to work from what it had at that time, so it holds on to the last few versions.
"""

from __future__ import annotations

import re
from pathlib import Path

from perdure.core.encoding import SUFFIX, decode, encode
from perdure.core.files import hash_name, read_hashed, remove_temporaries, write_atomic
from perdure.core.trees import Tree

_NAME = re.compile(r"(\d{8,})-[0-9a-f]{32}" + re.escape(SUFFIX))


class ClientStateHistory:
    """The kept states of a node's clients in one run, in a folder of the node."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def get(self, client: int, position: int) -> Tree:
        """What a client had when the run was at a position: the last that it kept before.

        What it kept at this position or later is of a future that the run has left: it is deleted.
        """
        past = []
        for path in self._paths(client):
            if _position(path) < position:
                past.append(path)
            else:
                path.unlink(missing_ok=True)
        return decode(read_hashed(past[-1])) if past else {}

    def put(self, client: int, position: int, tree: Tree) -> None:
        """Keep a state as of a position, and the last few before it."""
        folder = self._of(client)
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporaries(folder)
        data = encode(tree)
        write_atomic(folder / hash_name(position, data, SUFFIX), data)
        for old in self._paths(client)[: -self._keep]:
            old.unlink(missing_ok=True)

    def _of(self, client: int) -> Path:
        return self._folder / f"client-{client}"

    def _paths(self, client: int) -> list[Path]:
        folder = self._of(client)
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_position)


def _position(path: Path) -> int:
    return int(path.name.partition("-")[0])
