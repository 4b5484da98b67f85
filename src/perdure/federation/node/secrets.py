"""What a node keeps secret: its clients' side of secure sums, and draws from the system."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from perdure.contract.uploads import Upload
from perdure.core.files import write_atomic
from perdure.core.rng import system_generator
from perdure.federation.messages import BadMessage

# ------------------------------------------------------------------------------------------------
# One client's side of secure sums, stored on its node between two requests.
#
# Its secrets come from the operating system, are new for every task and never leave the node. Its
# answers are remembered for the whole task, so it never covers two uploads with the same masks,
# even if the server goes back to a checkpoint and asks again.
# ------------------------------------------------------------------------------------------------


class SecAggClientStore:
    """One client in the secure sums of one task, stored in a file."""

    def __init__(self, folder: Path, client: int, task: int) -> None:
        """Load the client, or create it with new keys.

        What it did in earlier tasks stays on record, so that a server which goes back gets no sum
        of other clients than before.
        """
        from perdure.privacy.secagg.client import SecAggClient
        from perdure.privacy.secagg.keys import TaskKeys

        self._path = folder / f"client-{client}-task-{task}.json"
        self._client = SecAggClient(TaskKeys(client))
        if self._path.is_file():
            self._client = SecAggClient.from_tree(json.loads(self._path.read_text("ascii")))
        else:
            self._save()

    def public_key(self) -> bytes:
        """Return the client's public key."""
        return self._client.keys.public

    def upload(self, sum_request: bytes, fields: Upload, weight: float) -> bytes:
        """Return the masked upload, which must not leave the node before `remember`.

        Raises:
            BadMessage: The request would not protect this client.

        """
        try:
            return self._client.upload(sum_request, fields, weight)
        except ValueError as error:
            raise BadMessage(str(error)) from None

    def remember(self, sum_request: bytes, upload: bytes) -> None:
        """Store that an upload leaves the node, so that no other one is made for its sum.

        The reply with the upload must be stored first. If the node dies between the two, it sends
        that reply; the other way around it could send none, since new draws make another upload.

        Raises:
            BadMessage: The client took part in another sum, or with another upload.

        """
        try:
            self._client.remember(sum_request, upload)
        except ValueError as error:
            raise BadMessage(str(error)) from None
        self._save()

    def answer(self, request: bytes) -> bytes:
        """Return the answer to a request about an earlier upload.

        Raises:
            BadMessage: The answer would reveal too much.

        """
        try:
            data = self._client.answer(request)
        except ValueError as error:
            raise BadMessage(str(error)) from None
        self._save()
        return data

    def _save(self) -> None:
        """Store the client before its answer leaves the node, so that no answer is forgotten."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(self._path, json.dumps(self._client.to_tree()).encode("ascii"))


@dataclass(frozen=True)
class SumMasks:
    """A client's masks of one secure sum."""

    store: SecAggClientStore
    """The client."""
    sum_request: bytes
    """The request for the sum."""

    def upload(self, client: int, fields: Upload, weight: float) -> bytes:
        """Return the client's masked upload."""
        return self.store.upload(self.sum_request, fields, weight)


# ------------------------------------------------------------------------------------------------
# Secret draws of clients on real nodes, which no one who knows the run's seed can repeat.
# ------------------------------------------------------------------------------------------------

SecretSource = Callable[[str], torch.Generator]
"""Returns the generator for a purpose."""


class SecretDraws:
    """One client's secret draws in one exchange, from the operating system.

    As with `Client.draw`, the same purpose has the same draws.
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    @property
    def were_used(self) -> bool:
        """Whether anything was drawn."""
        return bool(self._states)

    def __call__(self, purpose: str) -> torch.Generator:
        """Return a generator for a purpose."""
        if purpose not in self._states:
            self._states[purpose] = system_generator().get_state()
        generator = torch.Generator()
        generator.set_state(self._states[purpose])
        return generator
