"""The states of a node's clients, by the position in the run at which they were stored.

A server that is restarted resumes from its last checkpoint and repeats the rounds after it. The
node then needs the states of that time, so it keeps the last few.
"""

from __future__ import annotations

import re
from pathlib import Path

from perdure.core.encoding import SUFFIX, decode, encode
from perdure.core.files import hash_name, read_hashed, remove_temporaries, write_atomic
from perdure.core.trees import Tree

_NAME = re.compile(r"(\d{8,})-[0-9a-f]{32}" + re.escape(SUFFIX))


class ClientStateHistory:
    """The last states of a node's clients in one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Use a folder of the node.

        Args:
            folder: Where the states are stored, one folder per client.
            keep: Number of states to keep per client.
        """
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
