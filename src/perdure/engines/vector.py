"""Clients stacked and trained together.

A chunk of clients is one stack of tensors with a leading client axis, on which each step is one
function (engines.steps). Unequal client sizes: within a chunk clients are sorted by their number of
steps, so the clients that are still in training are always the first ones of the stack.
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

_WEIGHT_BYTES, _SAVED_BYTES = 21_000_000, 10_000_000
"""Weights and saved activations of a chunk: where larger chunks were measured to be slower, since
the stack no longer fits the cache. Activations are written anew in every step: they count more."""


class VectorEngine(InProcessEngine):
    """Trains chunks of clients as one stack."""

    name = "vector"

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk
        self._steps = TracedSteps()
        self._serial: SerialEngine | None = None
        self._sized = (-1, 0)
        """A task, and the chunk that was found for it."""

    @classmethod
    def from_config(cls, config: Config) -> VectorEngine:
        """Return the engine of a config."""
        return cls(config.engine.chunk)

    def train(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads]:
        """Train chunk after chunk, in the order of the clients."""
        task = training.context.task
        if self.chunk is None and self._sized[0] != task:
            self._sized = (task, chunk_size(training, clients[0]))
        size = self.chunk or self._sized[1]
        for first in range(0, len(clients), size):
            yield from self._train_chunk(training, clients[first : first + size], save_client)

    def choice(self) -> Tree:
        """Return the chunk, and whether clients could not be stacked: both show in the bits."""
        serial = self._serial is not None
        return {"chunk": self.chunk, "serial": serial, "sized": list(self._sized)}

    def restore(self, choice: Tree) -> None:
        """Go on serially where an earlier process came to that."""
        self._serial = SerialEngine() if choice.get("serial") else None
        self._sized = tuple(choice["sized"])

    def _train_chunk(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads]:
        if self._serial is None:
            try:
                params, buffers = train_stack(training, clients, self._steps)
            except (RuntimeError, NotImplementedError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                log.warning("this work cannot be vectorised, running it serially: %s", reason)
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
    """Yield the uploads of a chunk: as one stack unless `make_upload` takes one client."""
    if training.train.make_upload is not None and not is_stacked(training.train.make_upload):
        for row, client in enumerate(clients):
            own = {name: value[row] for name, value in params.items()}
            statistics = {name: value[row] for name, value in buffers.items()}
            yield upload_client(training, client, own, statistics, save_client)
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
    """Return the number of clients whose weights and saved activations fit the cache together."""
    leaves = {name: training.params[name].clone().requires_grad_() for name in training.trainable}
    weights, saved = {leaf.data_ptr(): leaf.nbytes for leaf in leaves.values()}, 0
    shared = {tensor.data_ptr() for tensor in training.context.network.constants.values()}

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        here = tensor.data_ptr()
        saved += 0 if here in weights or here in shared else tensor.nbytes
        return tensor

    zero = torch.zeros((), dtype=torch.int64)
    batch = client.data.batch(client.data.index[: training.config.batch_size], zero)
    local = training.prepare_client(client)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        training.loss(leaves, training.buffers, batch, zero, training.broadcast, local)
    fits = min(_WEIGHT_BYTES // max(sum(weights.values()), 1), _SAVED_BYTES // max(saved, 1))
    return max(2, fits)
