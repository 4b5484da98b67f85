"""The clients of secure sums in a simulation, which protects nobody."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from perdure.contract.uploads import Upload
from perdure.core.rng import Rng
from perdure.privacy.secagg.client import SecAggClient
from perdure.privacy.secagg.keys import TaskKeys
from perdure.privacy.secagg.messages import SumRequest
from perdure.privacy.secagg.sizes import KEY_BYTES
from perdure.privacy.secagg.wire import decode


@dataclass
class SimulatedSecAggClients:
    """All clients of secure sums in this process; their keys derive from the run's seed."""

    rng: Rng
    """Draws of the run."""
    _task: int = -1
    _clients: dict[int, SecAggClient] = field(default_factory=dict)
    _sum_request: bytes = b""

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """Return the public keys of these clients, made when a client first joins in a task."""
        if task != self._task:
            self._task, self._clients = task, {}
        for client in clients:
            if client not in self._clients:
                master = self.rng.numpy_generator("secagg", task, client).bytes(KEY_BYTES)
                self._clients[client] = SecAggClient(TaskKeys(client, master))
        return {client: self._clients[client].keys.public for client in clients}

    def announce(self, sum_request: bytes) -> None:
        """Set the request of the next uploads, and forget the sums of earlier rounds."""
        self._sum_request = sum_request
        position = decode(sum_request, SumRequest).session.position
        for client in self._clients.values():
            client.forget_before(position)

    def upload(self, client: int, fields: Upload, weight: float) -> bytes:
        """Return a client's masked upload."""
        return self._clients[client].upload(self._sum_request, fields, weight)

    def ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        """Return the answers of all clients that are asked."""
        return {client: self._clients[client].answer(data) for client, data in requests.items()}
