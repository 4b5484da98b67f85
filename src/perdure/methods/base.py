"""The contract of a method.

A method is a frozen dataclass of hyper-parameters with a few small pure functions: everything it
knows comes in as an argument, everything it changes goes out as a value. It never sees the engine,
the transport, a file, a clock or a global random state. Every function has a default, and the
defaults together are FedAvg; a method overrides the few that its paper changes.

    server:    start, begin_task, broadcast, combine, adjust (aggregate puts the last two together);
               absorb, for an extra round at a task's end
    client:    trainable, starting, prepare, loss, penalty, gradient, settle, finish (finish_all for
               a stack); extract, for the extra round
    inference: predict, route
    network:   adapt, for methods that train something else than the network as it is
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from perdure.data.inputs import Inputs
from perdure.federation.messages import Report, Sum, Upload
from perdure.models.network import Network
from perdure.models.ops import cross_entropy
from perdure.models.passes import Pass
from perdure.rng import Draws
from perdure.trees import Tensors, Tree, add

ALL_STREAMS = frozenset({"permuted", "split", "domains", "pool"})


@dataclass(frozen=True)
class Place:
    """Where in the run we are, and what is fixed there."""

    network: Network
    draws: Draws
    task: int
    tasks: int
    round: int
    rounds: int
    lr: float
    """Local learning rate of this round."""
    clients: int = 0
    """Clients that hold data of this task."""
    attendance: float = 1.0
    """Share of the round's sampled clients whose reports were counted, told when it is closed."""
    extra: int = 0
    """Which of the extra rounds at a task's end this is."""
    attempt: int = 0
    """How often this round was begun before and lost, because too few clients were left."""


@dataclass(frozen=True)
class Server:
    """All that the server knows."""

    params: Tensors
    buffers: Tensors = field(default_factory=dict)
    """Running statistics of batch norm."""
    memory: Tree = field(default_factory=dict)
    """The method's own."""


@dataclass(frozen=True)
class Batch:
    """A client's examples for one step. Under vmap this is one client's part of a stack."""

    x: Tensor
    y: Tensor
    """int64 [batch]: the output that should win."""
    mask: Tensor | None = None
    """float [batch], 0 for padding; None: all rows are real."""
    allowed: Tensor | None = None
    """bool [outputs]: outputs that compete in the loss; None: all."""
    known: Tensor | None = None
    """What the network knows of each row beforehand; None: nothing."""
    epoch: Tensor | None = None
    """int64 scalar: which of the client's local epochs this is, from 0; None: the first."""

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one value a row, over the real rows."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum().clamp(min=1.0)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Mean cross-entropy among the outputs that compete."""
        if self.allowed is not None:
            logits = logits.masked_fill(~self.allowed, -1e9)
        if self.mask is None:  # one operation, which vmap would not do as one
            return F.cross_entropy(logits, self.y)
        return self.mean(cross_entropy(logits, self.y))


@dataclass(frozen=True)
class Net:
    """The network within one pass: what a loss calls."""

    network: Network
    run: Pass

    def knowing(self, batch: Batch) -> Net:
        """The same, told what is known of a batch that comes next."""
        return Net(self.network.knowing(batch.known), self.run)

    def features(self, params: Tensors, x: Tensor) -> Tensor:
        """The input of the head."""
        return self.network.features(params, x, self.run)

    def classify(self, params: Tensors, features: Tensor) -> Tensor:
        """The head alone."""
        return self.network.classify(params, features, self.run)

    def logits(self, params: Tensors, x: Tensor) -> Tensor:
        """One value an output."""
        return self.network.logits(params, x, self.run)


@dataclass(frozen=True)
class Shard:
    """A client's data of the current task: an index into rows that are in memory once."""

    inputs: Inputs
    index: Tensor
    targets: Tensor
    """Output index of every row of the task's training set (not of the shard alone)."""
    allowed: Tensor | None
    """Outputs that compete in the loss."""

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, rows: Tensor) -> Batch:
        """The examples at these row numbers of the task's training set."""
        x, known = self.inputs.gather(rows), self.inputs.tell(rows)
        return Batch(x, self.targets[rows], None, self.allowed, known)

    def batches(self, size: int = 256) -> Iterator[Batch]:
        """All examples once, in a fixed order."""
        for rows in torch.split(self.index, size):
            yield self.batch(rows)


@dataclass(frozen=True)
class Client:
    """One client in one round: its data, what it received and what it kept."""

    id: int
    place: Place
    shard: Shard
    kept: Tree
    weight: float
    params: Tensors
    """The global model as received."""
    buffers: Tensors
    received: Tree
    """`params` and what the method broadcast."""
    epochs: int = 1
    """Local epochs of a round."""

    def draw(self, purpose: str) -> torch.Generator:
        """A generator for this client, in this round, for this purpose."""
        return self.place.draws.torch(purpose, self.place.task, self.place.round, self.id)

    def net(self, taps: Tensors | None = None) -> Net:
        """The network in evaluation mode, optionally recording the input of each layer."""
        return Net(self.place.network, Pass(buffers=self.buffers, taps=taps))


@dataclass(frozen=True)
class Finish:
    """What a client sends and what it keeps after its work."""

    upload: Upload
    kept: Tree | None = None
    """None: what it had kept stays as it is."""


@dataclass(frozen=True)
class Method:
    """FedAvg, function by function: the defaults of every method."""

    paper: ClassVar[str] = ""
    streams: ClassVar[frozenset[str]] = ALL_STREAMS
    beside_prompts: ClassVar[bool] = True
    """Whether it can be combined with prompts. Not where it works on the layers that are trained,
    or on outputs that depend on a task's own prompts."""

    def has_own(self, name: str) -> bool:
        """Whether it has a function of its own in place of the default of this name."""
        return getattr(type(self), name) is not getattr(Method, name)

    # ---- before training

    def refuse(self, config: Any) -> str | None:
        """A reason why this method cannot run this config, or None."""
        kind = config.stream.kind
        if kind in self.streams:
            return None
        allowed = ", ".join(sorted(self.streams))
        return f"stream.kind: got {kind!r}, allowed with this method: {allowed}"

    def preferred_head(self, stream: str) -> str:
        """The head that the method wants on a kind of stream: shared or growing."""
        return "shared"

    def loss_outputs(self) -> str:
        """Which outputs compete in the loss under a shared head: task, seen or all."""
        return "all"

    def preferred_weighting(self) -> str:
        """The weights of the server's average that the method wants: samples or uniform."""
        return "samples"

    def heaviest(self, rows: int, weighting: str) -> int:
        """The largest weight with which a client of so many rows may report."""
        return rows if weighting == "samples" else 1

    def adapt(self, network: Network) -> Network:
        """The network that is trained and predicts, made from the one that the config names."""
        return network

    def shown_fields(self) -> tuple[str, ...]:
        """Names of the fields that it sends as Each, for the server to see client by client."""
        return ()

    # ---- server

    def start(self, params: Tensors, place: Place) -> Tree:
        """The server's memory before the first task."""
        return {}

    def begin_task(self, server: Server, place: Place) -> Server:
        """What changes when a task arrives."""
        return server

    def broadcast(self, server: Server, place: Place) -> Tree:
        """What clients receive in every round besides the model: tensors only."""
        return {}

    def broadcast_lasting(self, server: Server, place: Place) -> Tree:
        """What clients receive once a task and keep until it ends: tensors only."""
        return {}

    def combine(self, report: Report, server: Server, place: Place) -> Tensors:
        """One direction from the clients' updates."""
        return report.mean("update")

    def adjust(self, update: Tensors, server: Server, place: Place) -> tuple[Tensors, Tree]:
        """The change that is applied to the model, and the new memory."""
        return update, server.memory

    def adjust_buffers(self, change: Tensors, server: Server, place: Place) -> Tensors:
        """The change that is applied to the running statistics."""
        return change

    def aggregate(self, server: Server, report: Report, place: Place) -> Server:
        """The server's half of a round."""
        update, memory = self.adjust(self.combine(report, server, place), server, place)
        buffers = server.buffers
        if "buffers" in report.totals or "buffers" in report.each:
            change = self.adjust_buffers(report.mean("buffers"), server, place)
            buffers = add(buffers, change)
        return Server(add(server.params, update), buffers, memory)

    def consolidates(self, place: Place) -> int:
        """Extra rounds at this task's end: in each, extract on clients and absorb on the server.

        A bool will do. What the second one is about, clients learn from what is broadcast.
        """
        return 0

    def consolidates_alone(self) -> bool:
        """Whether the extra rounds are the clients' own work, for which nothing travels.

        Clients send nothing then, and do the work when their next round brings them the model that
        the task ended with; it is done here at the task's end, which comes to the same.
        """
        return False

    def absorb(self, server: Server, report: Report, place: Place) -> Server:
        """What the server learns from the extra round at a task's end."""
        return server

    def diagnose(self, server: Server, place: Place) -> Tree:
        """Plain numbers about the method's inner state, for events.jsonl."""
        return {}

    # ---- client

    def trainable(self, params: Tensors, place: Place) -> tuple[str, ...]:
        """Names of the parameters that are trained (and travel) in this task.

        Of a growing head only the slice of the current task is.
        """
        own = f"head.{place.task}."
        growing = f"head.{place.task}.weight" in params
        return tuple(
            name
            for name in params
            if not (growing and name.startswith("head.")) or name.startswith(own)
        )

    def batch_statistics(self, place: Place) -> bool:
        """Whether batch norm uses and updates batch statistics during training."""
        return True

    def starting(self, client: Client) -> Tensors:
        """Trained parameters with which a client begins in place of those that it received."""
        return {}

    def derive(self, received: Tree) -> Tree:
        """What clients work out from what they received, once a round, as more of `received`."""
        return {}

    def prepare(self, client: Client) -> Tensors:
        """Tensors of this client alone that loss and gradient need (`own`).

        When clients are stacked, tensors of unequal shape are padded with zeros at their end.
        """
        return {}

    def loss(self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors) -> Tensor:
        """The loss of one batch. Pure: it is vectorised and traced."""
        return batch.cross_entropy(net.logits(params, batch.x))

    def penalty(
        self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors
    ) -> Tensor:
        """A term that is added to the loss."""
        raise NotImplementedError  # only called where it is overridden

    def gradient(self, grads: Tensors, params: Tensors, received: Tree, own: Tensors) -> Tensors:
        """The gradient (weight decay included) that the optimiser gets. Pure, as loss."""
        return grads

    def guards(self, received: Tree) -> dict[str, Tensors]:
        """Input spaces by weight name, where `gradient` only projects each weight away from its.

        The engine may then project the layer's inputs instead, which gives the same gradient and is
        cheaper for small batches. Without any, it calls `gradient`.
        """
        return {}

    def settle(
        self, params: Tensors, before: Tensors, received: Tree, own: Tensors, lr: float
    ) -> Tensors:
        """The parameters after an optimiser step."""
        return params

    def settles(self, optimizer: str) -> bool:
        """Whether settle has anything to do with this optimiser: sgd, adam or adamw."""
        return overrides(self, "settle")

    def finish(self, client: Client, update: Tensors, buffers: Tensors) -> Finish:
        """What a client sends after its local steps: by default its update, as a sum."""
        return Finish(default_upload(update, buffers))

    def finish_all(self, clients: list[Client], update: Tensors, buffers: Tensors) -> Upload:
        """`finish` of clients that were trained as one stack: tensors with a leading client axis.

        For methods that keep nothing in `finish` and can do its work for all clients at once; it
        must say what `finish` says.
        """
        raise NotImplementedError  # only called where it is overridden

    def extract(self, client: Client) -> Finish:
        """What a client computes and sends in the extra round at a task's end."""
        return Finish({})

    # ---- inference

    def export(self, server: Server) -> Tree:
        """The part of the memory that prediction needs."""
        return server.memory

    def predict(self, server: Server, x: Tensor, network: Network) -> Tensor:
        """Logits of a batch by the global model."""
        run = Pass(buffers=server.buffers)
        return network.logits(server.params, x, run)

    def route(self, server: Server, x: Tensor, network: Network) -> Tensor | None:
        """The task of each row, int64 [batch], where the method can tell; else None."""
        return None


def default_upload(update: Tensors, buffers: Tensors) -> Upload:
    """The update and, where the model has them, the change of the running statistics."""
    fields: dict[str, Sum] = {"update": Sum(update)}
    if buffers:
        fields["buffers"] = Sum(buffers)
    return fields


def overrides(method: Method, name: str) -> bool:
    """Whether a method has a function of its own in place of the default."""
    return method.has_own(name)
