"""A client's part in secure sums, kept on its node between two orders.

Its secrets come from the operating system, are new for every task and never leave the node. What it
answered is remembered for the whole task: so it never covers two uploads with the same masks, even
for a server that goes back to a checkpoint and asks again.
"""

from __future__ import annotations

import json
from pathlib import Path

from perdure.contract.uploads import Upload
from perdure.core.files import write_atomic
from perdure.flower.protocol import BadMessage


class SecAggClientStore:
    """One client in the secure sums of one task."""

    def __init__(self, folder: Path, client: int, task: int) -> None:
        from perdure.privacy.secagg.client import SecAggClient
        from perdure.privacy.secagg.keys import TaskKeys

        self._path, self._task = folder / f"client-{client}.json", task
        self._participant = SecAggClient(TaskKeys(client))
        if self._path.is_file():
            kept = json.loads(self._path.read_text(encoding="ascii"))
            if kept["task"] == task:
                self._participant = SecAggClient.from_tree(kept["participant"])
                return
        self._save()

    def public(self) -> bytes:
        """The key that others need."""
        return self._participant.keys.public

    def upload(self, call: bytes, fields: Upload, weight: float) -> bytes:
        """The masked upload; BadMessage if the call would not protect this client."""
        try:
            data = self._participant.upload(call, fields, weight)
        except ValueError as error:
            raise BadMessage(str(error)) from None
        self._save()
        return data

    def answer(self, request: bytes) -> bytes:
        """What the others need of it; BadMessage if it would reveal too much."""
        try:
            data = self._participant.answer(request)
        except ValueError as error:
            raise BadMessage(str(error)) from None
        self._save()
        return data

    def _save(self) -> None:
        """Before anything is told to others: what was told must never be forgotten."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept = {"task": self._task, "participant": self._participant.to_tree()}
        write_atomic(self._path, json.dumps(kept).encode("ascii"))
