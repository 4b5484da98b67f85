"""Everything that a config stands for, put together: stream, network, method, engine, store."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config
from perdure.data.known import Files, remembering
from perdure.data.streams import Stream, Task, make_stream
from perdure.engines import make_engine
from perdure.engines.optimizers import learning_rate
from perdure.engines.work import Engine
from perdure.errors import UserError
from perdure.federation.state import State
from perdure.methods import build, spelled_out
from perdure.methods.base import Client, Method, Place, Server, Shard
from perdure.models.heads import Outputs
from perdure.models.network import Network, make_network
from perdure.models.passes import Pass
from perdure.models.prompts import Prompted
from perdure.models.weights import load_weights
from perdure.privacy.policy import Privacy, make_privacy
from perdure.rng import Draws
from perdure.runs.store import ClientStore
from perdure.trees import Tensors, Tree, to_device

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experiment:
    """The fixed parts of a run. What changes is in State."""

    config: Config
    method: Method
    stream: Stream
    network: Network
    engine: Engine
    store: ClientStore
    draws: Draws
    device: torch.device
    privacy: Privacy

    @property
    def tasks(self) -> int:
        """Tasks of the stream."""
        return len(self.stream.tasks)

    def task(self, number: int) -> Task:
        """One task of the stream."""
        return self.stream.tasks[number]

    def place(self, state: State) -> Place:
        """Where in the run a state is."""
        rounds = self.config.rounds(state.task)
        lr = learning_rate(self.config.train, state.task, state.round, rounds)
        clients = int(np.count_nonzero(self.task(state.task).shares.sizes))
        return Place(
            self.network, self.draws, state.task, self.tasks, state.round, rounds, lr, clients
        )  # fmt: skip

    def start(self) -> State:
        """The state before the first round."""
        params, buffers = self.network.init(self.draws.torch("init"))
        file = self.config.model.weights_file
        if file:
            params, buffers, report = load_weights(file, params, buffers)
            log.info("%s", report.summary())
        params, buffers = to_device(params, self.device), to_device(buffers, self.device)
        state = State(Server(params, buffers))
        memory = self.method.start(params, self.place(state))
        state.server = Server(params, buffers, memory)
        self._check_trainable(state)
        return state

    def _check_trainable(self, state: State) -> None:
        """Refuse a method that freezes everything in some task (a growing head is never frozen)."""
        place = self.place(state)
        for task in range(self.tasks) if self.network.outputs.kind == "shared" else ():
            if not self.method.trainable(state.server.params, replace(place, task=task)):
                raise UserError(
                    f"method: leaves nothing of the model to train in task {task + 1}, allowed: "
                    "options that leave some of it"
                )

    def grow(self, params: Tensors, task: int) -> Tensors:
        """The parameters with the outputs of a task."""
        grown = self.network.grow(params, task, self.draws.torch("head", task))
        return to_device(grown, self.device) if grown is not params else params

    def client(self, number: int, place: Place, server: Server, received: Tree) -> Client:
        """A client as a method sees it in this round."""
        task = self.task(place.task)
        index = task.shares.index(number).to(self.device)
        shard = Shard(task.train, index, self._targets(place.task), self._allowed(task, number))
        weight = float(len(index)) if self._weighting == "samples" else 1.0
        kept = to_device(self.store.get(number), self.device)
        return Client(
            number, place, shard, kept, weight, server.params, server.buffers, received,
            self.config.train.local_epochs,
        )  # fmt: skip

    def _targets(self, number: int) -> Tensor:
        return _row_targets(self.network.outputs, self.task(number))

    def _allowed(self, task: Task, client: int) -> Tensor | None:
        if self._loss_outputs == "all":
            return None
        if self._loss_outputs == "seen":
            return self.network.outputs.seen(task.index).to(self.device)
        own = task.choice(client) if task.choice is not None else None
        return self.network.outputs.allowed(task.index, task.index, own).to(self.device)

    @cached_property
    def _weighting(self) -> str:
        return self.config.train.weighting or self.method.preferred_weighting()

    @cached_property
    def _loss_outputs(self) -> str:
        usual = "task" if self.network.outputs.kind == "growing" else self.method.loss_outputs()
        return self.config.train.outputs or usual


@lru_cache(maxsize=2)
def _cached_targets(outputs: Outputs, number: int, labels: _Identity) -> Tensor:
    targets = outputs.targets(number).to(labels.tensor.device)
    return targets[labels.tensor]


class _Identity:
    """A tensor that is compared by identity, to be a key."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.tensor is self.tensor


def _row_targets(outputs: Outputs, task: Task) -> Tensor:
    """The output that should win for each row of a task's training set."""
    return _cached_targets(outputs, task.index, _Identity(task.train_labels))


def complete(config: Config, beside: Path | None = None) -> Config:
    """The config with its method's defaults written out, as those of all other sections are."""
    return config.model_copy(update={"method": spelled_out(config.method, beside)})


def prepare(
    config: Config,
    folder: Path | None = None,
    beside: Path | None = None,
    engine: Engine | None = None,
    stream: Stream | None = None,
    known: Path | None = None,
) -> Experiment:
    """Check and build everything that a config names; nothing is written.

    `folder`: where clients' states are kept (None: in memory). `beside`: where a method of the
    user's own is looked for. `engine`, `stream`: in place of those that the config names; the
    tasks of a stream that is given are not looked at before they are needed. `known`: where to keep
    what a network knows of rows beforehand, for other processes too (None: in memory, and nothing
    of a stream that is given).
    """
    method = build(config.method, beside)
    reason = method.refuse(config)
    if reason:
        raise UserError(reason)
    device, draws = pick_device(config.device), Draws(config.seed)
    engine = engine or make_engine(config)
    given = stream = stream or engine.stream(config)
    if stream is None:
        stream = make_stream(config, draws).to(device)
        check_tasks(stream)
    network = make_network(config.model, stream.shape, make_outputs(config, method, stream))
    network = method.adapt(network).to(device)
    if given is None or known is not None:
        stream = with_known(stream, network, known)
    store = ClientStore(folder)
    privacy = make_privacy(config, method, stream, engine, draws)
    return Experiment(config, method, stream, network, engine, store, draws, device, privacy)


def with_known(stream: Stream, network: Network, folder: Path | None = None) -> Stream:
    """The stream with what the network would compute of its rows again and again, if anything."""
    body = network.body
    if not (isinstance(body, Prompted) and body.remembers):
        return stream
    card = network.backbone  # a random one has none, and is not known again
    files = Files(folder, card["sha256"]) if folder is not None and card else None
    return remembering(stream, lambda x: body.query(x, Pass()), body.feature_size, files)


def check_tasks(stream: Stream) -> None:
    """Refuse a task that nobody could train or that could not be judged."""
    for task in stream.tasks:
        if not task.shares.sizes.any():
            lack = "no client holds data of"
        elif not any(len(group.index) for group in task.groups):
            lack = "no test data is there for"
        else:
            continue
        raise UserError(
            f"stream.tasks: got {len(stream.tasks)}, but {lack} task {task.index + 1} "
            f"({task.name}), allowed: tasks with training and test data"
        )


def make_outputs(config: Config, method: Method, stream: Stream) -> Outputs:
    """The head's outputs on a stream."""
    preferred = method.preferred_head(stream.kind)
    kind: Literal["shared", "growing"] = "growing" if preferred == "growing" else "shared"
    kind = config.model.head or kind
    if kind == "growing" and stream.kind == "pool":
        raise UserError("model.head: got 'growing', allowed on a pool stream: shared")
    return Outputs(kind, stream.classes, stream.task_classes)


def pick_device(name: str) -> torch.device:
    """The device of a config; auto: the best one there is."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next((kind for kind, found in there.items() if found), "cpu"))
    if not there.get(name, True):
        found = ", ".join(["auto", "cpu", *(kind for kind, ok in there.items() if ok)])
        raise UserError(f"device: got {name!r}, allowed on this machine: {found}")
    return torch.device(name)
