"""The vector engine: clients stacked and trained together.

A chunk of clients is one stack of tensors with a leading client axis, on which each step is one
function (see `traced_steps`). Clients may have different numbers of steps: within a chunk they are
sorted by them, so that the clients that still train are always the first rows of the stack.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from perdure.config import Config
from perdure.contract.checks import refuse
from perdure.contract.context import Client
from perdure.contract.exchanges import is_stacked
from perdure.contract.local_training import LocalTraining, SaveClient
from perdure.contract.upload_collector import StackedUploads
from perdure.contract.uploads import LocalUpdate
from perdure.core.trees import Tensors, Tree, subtract
from perdure.engines.in_process import InProcessEngine
from perdure.engines.serial import SerialEngine, upload_client
from perdure.engines.stack import train_stack
from perdure.engines.traced_steps import TracedSteps

log = logging.getLogger(__name__)

_WEIGHT_BYTES, _ACTIVATION_BYTES = 21_000_000, 10_000_000
"""Largest weights and saved activations of a chunk. Larger chunks were measured to be slower, since
the stack no longer fits into the cache. Activations are written in every step and count more."""


class VectorEngine(InProcessEngine):
    """Trains chunks of clients as one stack.

    Args:
        chunk: Clients per stack. If None, chosen once per task so that a stack fits into the cache.
    """

    name = "vector"

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk
        self._steps = TracedSteps()
        self._serial: SerialEngine | None = None
        """Trains in place of this engine if clients could not be stacked."""
        self._task_chunk = (-1, 0)
        """A task, and the chunk that was chosen for it."""

    @classmethod
    def from_config(cls, config: Config) -> VectorEngine:
        """Return the engine of a config."""
        return cls(getattr(config.engine, "chunk", None))

    def train(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads]:
        """Train chunk after chunk, in the order of the clients."""
        task = training.context.task
        if self.chunk is None and self._task_chunk[0] != task:
            self._task_chunk = (task, chunk_size(training, clients[0]))
        size = self.chunk or self._task_chunk[1]
        for first in range(0, len(clients), size):
            yield from self._train_chunk(training, clients[first : first + size], save_client)

    def choice(self) -> Tree:
        """Return the chunk, and whether clients could not be stacked; both change the rounding."""
        serial = self._serial is not None
        return {"chunk": self.chunk, "serial": serial, "task_chunk": list(self._task_chunk)}

    def restore(self, choice: Tree) -> None:
        """Use the chunk of an earlier process, and train serially if it had to."""
        self._serial = SerialEngine() if choice["serial"] else None
        self._task_chunk = tuple(choice["task_chunk"])

    def _train_chunk(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads]:
        reason = None if self._serial else training.context.network.vector_reason
        if self._serial is None and reason is None:
            try:
                params, buffers = train_stack(training, clients, self._steps)
            except (RuntimeError, NotImplementedError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if reason is not None:
            log.warning("the clients cannot be stacked and are trained serially: %s", reason)
            self._serial = SerialEngine()
        if self._serial is not None:
            yield from self._serial.train(training, clients, save_client)
        else:
            yield from upload_stack(training, clients, params, buffers, save_client)


def upload_stack(
    training: LocalTraining,
    clients: list[Client],
    params: Tensors,
    buffers: Tensors,
    save_client: SaveClient,
) -> Iterator[StackedUploads]:
    """Yield the uploads of a trained chunk, and save client states and private parameters.

    Uploads are yielded as one stack, unless the method's `make_upload` takes one client.

    Args:
        training: What all clients of the round share.
        clients: The clients of the chunk.
        params: Their trained parameters, with a leading client axis.
        buffers: Their running statistics, with a leading client axis.
        save_client: Saves a client's new state and private parameters.
    """
    if training.train.make_upload is not None and not is_stacked(training.train.make_upload):
        for row, client in enumerate(clients):
            client_params = {name: value[row] for name, value in params.items()}
            client_buffers = {name: value[row] for name, value in buffers.items()}
            yield upload_client(training, client, client_params, client_buffers, save_client)
        return
    update = {name: params[name].sub_(training.params[name]) for name in training.sent}
    fields, states = training.make_upload(
        clients, LocalUpdate(update, subtract(buffers, training.buffers))
    )
    if states is not None and len(states) != len(clients):
        refuse(
            "make_upload: state",
            f"{len(states)} states",
            f"a list of {len(clients)}, one per client",
        )
    if states is not None or training.private:
        for row, client in enumerate(clients):
            private = {name: params[name][row].clone() for name in training.private}
            save_client(client.id, None if states is None else states[row], private)
    ids, weights = tuple(c.id for c in clients), tuple(c.weight for c in clients)
    yield StackedUploads(ids, weights, fields)


def chunk_size(training: LocalTraining, client: Client) -> int:
    """Return the number of clients whose weights and saved activations fit into the cache."""
    leaves = {name: training.params[name].clone().requires_grad_() for name in training.trainable}
    weights, saved = {leaf.data_ptr(): leaf.nbytes for leaf in leaves.values()}, 0
    shared = {tensor.data_ptr() for tensor in training.context.network.constants.values()}

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        address = tensor.data_ptr()
        saved += 0 if address in weights or address in shared else tensor.nbytes
        return tensor

    zero = torch.zeros((), dtype=torch.int64)
    batch = client.data.batch(client.data.index[: training.train_config.batch_size], zero)
    local = training.prepare_client(client)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        training.loss(leaves, training.buffers, batch, zero, training.broadcast, local)
    fits = min(_WEIGHT_BYTES // max(sum(weights.values()), 1), _ACTIVATION_BYTES // max(saved, 1))
    return max(2, fits)
