"""Arguments of a method's functions: the position in the run, the server, and a client."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic

import torch
from torch import Tensor

from perdure.contract.needs import Needs, max_weight
from perdure.contract.step import Batch
from perdure.contract.uploads import C, Nothing, S
from perdure.core.rng import Rng
from perdure.core.trees import Tensors, Tree
from perdure.data.examples import AnyExamples
from perdure.models.network import Network
from perdure.models.ops import ForwardPass

log = logging.getLogger(__name__)

# ---- Small groups: classes of which a client has too few rows to send anything about them


def in_large_class(labels: Tensor, min_rows: int) -> Tensor:
    """Return which rows are of a class with at least `min_rows` rows, bool [rows].

    Args:
        labels: int64 [rows]. Class of each row; or numbers, float [rows], which have no classes.
        min_rows: Rows that a class must have.

    """
    if labels.is_floating_point():
        return torch.ones_like(labels, dtype=torch.bool)
    return torch.bincount(labels, minlength=1)[labels] >= min_rows


# ---- Arguments of a method's functions: the position in the run, the server, and a client


@dataclass(frozen=True)
class Context:
    """Position in the run. It does not contain the number of tasks, which no method may use."""

    network: Network
    """The network with the outputs of the tasks so far."""
    rng: Rng
    """Source of all random draws, derived from the run's seed; use `draw`."""
    task: int
    """Index of the task, from 0."""
    round: int
    """Finished training rounds of this task: 0 before training, `rounds` at the task's end."""
    rounds: int
    """Training rounds of this task."""
    lr: float
    """Local learning rate of this round."""
    clients_total: int
    """Number of clients."""
    clients_with_data: int
    """Number of clients that hold data of this task."""
    parameters: Mapping[str, torch.Size]
    """Shapes of all parameters by name."""
    trainable: tuple[str, ...]
    """Names of the parameters that are trained unless `Train.trainable` names others. Of a growing
    head only the newest block is among them."""
    exchange: int = 0
    """Position within the task: 0 in training, 1, 2, ... at its end, -1, -2, ... before it."""
    needs: Needs = field(default_factory=Needs)
    """The needs of the whole method, with all combined parts."""
    earlier_rounds: int = 0
    """Training rounds of all earlier tasks together, by the config."""
    attempt: int = 0
    """Earlier attempts of this exchange, which were abandoned because too few clients were left."""
    local_steps: float = 0.0
    """Local steps of a round: the mean over the clients with data of this task, known to the server
    alone (0 on clients, which have `Client.steps`). `exchanges` must not use it."""

    @property
    def position(self) -> tuple[int, int, int]:
        """The task, the round and the exchange."""
        return self.task, self.round, self.exchange

    def draw(self, purpose: str) -> torch.Generator:
        """Return the server's random generator for one purpose in this round."""
        return self.rng.torch_generator(purpose, self.task, self.round)


def warn_nothing_sent(method: str, context: Context, consequence: str) -> None:
    """Log that no client sent what an exchange of a task collects."""
    log.warning(
        "task %d: %s: no client has enough rows (privacy.min_rows) to send anything, so that %s",
        context.task + 1, method, consequence,
    )  # fmt: skip


@dataclass(frozen=True)
class Server(Generic[S]):
    """The server: the global model and the method's state."""

    params: Tensors
    """All parameters of the global model by name."""
    buffers: Tensors = field(default_factory=dict)
    """Running statistics of batch norm by name."""
    state: S = field(default_factory=Nothing)  # type: ignore[assignment]
    """An instance of the method's `ServerState`."""


@dataclass(frozen=True)
class ClientData:
    """A client's examples of the current task: an index into the task's shared training set."""

    examples: AnyExamples
    """The task's whole training set."""
    index: Tensor
    """int64 [examples]: the client's rows of the task's training set."""
    targets: Tensor
    """int64 [rows]: output index of every row of the task's training set, not only the client's."""
    active_outputs: Tensor | None
    """bool [outputs]: the outputs included in the loss. If None, all of them."""

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, rows: Tensor, local_epoch: Tensor | None = None) -> Batch:
        """Return the examples at some rows of the task's training set.

        Args:
            rows: int64 [batch]. Row numbers of the task's training set.
            local_epoch: int64 scalar, from 0: recorded in the batch for the method. If None, 0.

        """
        x, cached = self.examples.gather(rows), self.examples.gather_cached(rows)
        return Batch(x, self.targets[rows], None, self.active_outputs, cached, local_epoch)

    def batches(self, size: int = 256) -> Iterator[Batch]:
        """Yield all of the client's examples once, in a fixed order, `size` at a time."""
        for rows in torch.split(self.index, size):
            yield self.batch(rows)

    def without_small_classes(self, min_rows: int) -> ClientData:
        """Return the examples of classes of which the client has at least `min_rows`."""
        is_large = in_large_class(self.targets[self.index], min_rows)
        return replace(self, index=self.index[is_large])


@dataclass(frozen=True)
class Client(Generic[C]):
    """One client in one exchange: its data, what it received and its state."""

    id: int
    """Index of the client, from 0."""
    context: Context
    """Position in the run."""
    data: ClientData
    """The client's examples of the current task."""
    state: C
    """An instance of the method's `ClientState`, with its defaults before the first result."""
    weight: float
    """Weight of a Sum without an explicit weight: the number of examples, or 1 (uniform)."""
    params: Tensors
    """The global model as received, with the client's private parameters in place."""
    buffers: Tensors
    """Running statistics of batch norm as received."""
    broadcast: Tree
    """The fields that the server sent in this exchange, and the global model as `params`."""
    epochs: int = 1
    """Local epochs of a round."""
    batch_size: int = 1
    """Examples per local step."""
    steps: int = 1
    """Local steps of a round."""
    momentum: float = 0.0
    """Momentum of the local optimizer."""
    sums_gradients: bool = True
    """Whether the local optimizer's steps are sums of gradients (sgd), and not adaptive."""
    secret_source: Callable[[str], torch.Generator] | None = None
    """Returns the generator of `secret` for a purpose. If None (simulations), `draw` is used."""
    weight_cap: float = math.inf
    """Number of examples beyond which the client's do not count (`federation.max_node_share`)."""
    stored_source: Callable[[], Iterator[Batch]] | None = None
    """Yields the stored examples. If None, no method of the combination stores examples."""
    min_rows: int = 0
    """Rows that the client must have to send anything, and rows of a class to send anything about
    the class (see `without_small_classes`)."""

    @property
    def max_weight(self) -> float:
        """Largest weight of a Sum that the server accepts."""
        return max_weight(self.context.needs, min(float(len(self.data)), self.weight_cap))

    @property
    def lr_sum(self) -> float:
        """Sum of the learning rates of the round's local steps."""
        return self.steps * self.context.lr

    @property
    def is_too_small(self) -> bool:
        """Whether the client has too few rows of the task to send anything in it."""
        return len(self.data) < self.min_rows

    def without_small_classes(self) -> Client[C]:
        """Return the client with its rows of classes of which it has at least `min_rows`.

        What is sent about single classes, such as their means, is computed from these rows alone:
        of a class with one row, the mean is that row. No row may be left.
        """
        if self.min_rows <= 1:
            return self
        return replace(self, data=self.data.without_small_classes(self.min_rows))

    def draw(self, purpose: str) -> torch.Generator:
        """Return the client's random generator for one purpose in this round.

        It is public: its draws can be repeated with the run's seed.
        """
        return self.context.rng.torch_generator(
            purpose, self.context.task, self.context.round, self.id
        )

    def secret(self, purpose: str) -> torch.Generator:
        """Return a random generator for draws that protect the client, such as noise.

        On a node of a real federation its draws cannot be repeated by anybody else. In a simulation
        it is the generator of `draw`.
        """
        return (self.secret_source or self.draw)(purpose)

    def stored_batches(self) -> Iterator[Batch]:
        """Yield the examples of earlier tasks that the methods of a combination store.

        The weight of a row is the number of examples that it stands for. It is for task-end
        exchanges; a method alone has its own state.
        """
        return iter(()) if self.stored_source is None else self.stored_source()

    def features(
        self, batch: Batch, params: Tensors | None = None, layer_inputs: Tensors | None = None
    ) -> Tensor:
        """Return the head's input for a batch, in evaluation mode.

        Args:
            batch: Examples, as returned by `data.batch`.
            params: All parameters. Default: the client's.
            layer_inputs: A dict to which the input of each weight layer is added by weight name.

        Returns:
            float [rows, feature size].

        """
        if not len(batch.x):
            return self._features_of_nothing(batch, params, layer_inputs)
        network = self.context.network.with_cached_features(batch.cached_features)
        fwd = ForwardPass(buffers=self.buffers, layer_inputs=layer_inputs)
        return network.features(self.params if params is None else params, batch.x, fwd)

    def _features_of_nothing(
        self, batch: Batch, params: Tensors | None, layer_inputs: Tensors | None
    ) -> Tensor:
        """Return `features` of no rows: those of one made-up row, which is cut off."""
        inputs: Tensors = {}
        cached = batch.cached_features
        row = replace(
            batch, x=batch.x.new_zeros(1, *batch.x.shape[1:]),
            cached_features=None if cached is None else cached.new_zeros(1, *cached.shape[1:]),
        )  # fmt: skip
        features = self.features(row, params, None if layer_inputs is None else inputs)
        if layer_inputs is not None:
            layer_inputs.update({name: value[:0] for name, value in inputs.items()})
        return features[:0]

    def logits(self, batch: Batch, params: Tensors | None = None) -> Tensor:
        """Return the logits of a batch, float [rows, outputs], in evaluation mode."""
        params, features = self.params if params is None else params, self.features(batch, params)
        return self.context.network.classify(params, features, ForwardPass(buffers=self.buffers))
