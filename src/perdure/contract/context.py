"""What the functions of a method are given: where in the run they are, the server, a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic

import torch
from torch import Tensor

from perdure.contract.needs import Needs
from perdure.contract.states import Nothing
from perdure.contract.step import Batch
from perdure.contract.uploads import C, S
from perdure.core.rng import Rng
from perdure.core.trees import Tensors, Tree
from perdure.data.inputs import Inputs
from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network


@dataclass(frozen=True)
class Context:
    """Where in the run we are. Nothing in it says how many tasks will come."""

    network: Network
    """The network with the outputs of the tasks so far."""
    rng: Rng
    task: int
    """Index of the task, from 0."""
    round: int
    """Training rounds of this task that are done: 0 before training, `rounds` at the task's end."""
    rounds: int
    """Training rounds of this task."""
    lr: float
    """Local learning rate of this round."""
    clients_total: int
    """Clients of the federation."""
    clients_with_data: int
    """Clients that hold data of this task."""
    parameters: Mapping[str, torch.Size]
    """Shapes of all parameters by name."""
    trainable: tuple[str, ...]
    """Names that are trained unless a method says less; of a growing head the newest block."""
    exchange: int = 0
    """Position within the task: 0 in training, 1, 2, ... at its end, -1, -2, ... before it."""
    needs: Needs = field(default_factory=Needs)
    """What the whole method needs, all combined parts together."""
    attempt: int = 0
    """How often this exchange was tried before and abandoned, because too few clients were left."""

    def draw(self, purpose: str) -> torch.Generator:
        """Return the server's generator for a purpose in this round."""
        return self.rng.torch_generator(purpose, self.task, self.round)


@dataclass(frozen=True)
class Server(Generic[S]):
    """All that the server knows: the global model and the method's state."""

    params: Tensors
    buffers: Tensors = field(default_factory=dict)
    """Running statistics of batch norm."""
    state: S = field(default_factory=Nothing)  # type: ignore[assignment]
    """An instance of the method's `ServerState`."""


@dataclass(frozen=True)
class ClientData:
    """A client's examples of the current task: an index into rows that are in memory once."""

    inputs: Inputs
    index: Tensor
    """int64: the client's rows of the task's training set."""
    targets: Tensor
    """int64: output index of every row of the task's training set (not of this client's alone)."""
    active_outputs: Tensor | None
    """bool [outputs]: the outputs included in the loss; None: all."""

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, rows: Tensor, epoch: Tensor | None = None) -> Batch:
        """Return the examples at these row numbers of the task's training set."""
        x, cached = self.inputs.gather(rows), self.inputs.gather_cached(rows)
        return Batch(x, self.targets[rows], None, self.active_outputs, cached, epoch)

    def batches(self, size: int = 256) -> Iterator[Batch]:
        """Return all examples once, in a fixed order."""
        for rows in torch.split(self.index, size):
            yield self.batch(rows)


@dataclass(frozen=True)
class Client(Generic[C]):
    """One client in one exchange: its data, what it received and its state."""

    id: int
    context: Context
    data: ClientData
    state: C
    """An instance of the method's `ClientState`; its defaults for a client that kept nothing."""
    weight: float
    """Weight of its fields unless a Sum says otherwise: its number of examples, or 1."""
    params: Tensors
    """The global model as received, with the client's private parameters in place."""
    buffers: Tensors
    broadcast: Tree
    """The fields that the server sent in this exchange, and the global model as `params`."""
    epochs: int = 1
    """Local epochs of a round."""
    batch_size: int = 1
    steps: int = 1
    """Local steps of a round."""
    momentum: float = 0.0
    """Of the local optimizer."""
    secret_source: Callable[[str], torch.Generator] | None = None
    """Where `secret` draws from, by purpose. If None, a simulation: the run's seed."""

    @property
    def lr_sum(self) -> float:
        """Sum of the learning rates of the round's local steps."""
        return self.steps * self.context.lr

    def draw(self, purpose: str) -> torch.Generator:
        """Return a public generator: whoever knows the run's seed can repeat its draws."""
        return self.context.rng.torch_generator(
            purpose, self.context.task, self.context.round, self.id
        )

    def secret(self, purpose: str) -> torch.Generator:
        """Return a generator for draws that protect the client.

        On a node of a real federation nobody else can repeat its draws; in a simulation it is that
        of `draw`.
        """
        return (self.secret_source or self.draw)(purpose)

    def features(
        self, batch: Batch, params: Tensors | None = None, layer_inputs: Tensors | None = None
    ) -> Tensor:
        """Return the head's input for a batch, in evaluation mode.

        Args:
            batch: Examples, as `data.batch` gives them.
            params: All parameters. Default: the client's.
            layer_inputs: If a dict, the input of each weight layer is put there by weight name.
        """
        network = self.context.network.with_cached_features(batch.cached_features)
        fwd = ForwardPass(buffers=self.buffers, layer_inputs=layer_inputs)
        return network.features(self.params if params is None else params, batch.x, fwd)

    def logits(self, batch: Batch, params: Tensors | None = None) -> Tensor:
        """Return the logits for a batch, in evaluation mode."""
        params, features = self.params if params is None else params, self.features(batch, params)
        return self.context.network.classify(params, features, ForwardPass(buffers=self.buffers))
