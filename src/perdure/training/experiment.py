"""Everything that a config stands for, put together: stream, network, method, engine, store."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perdure.config import Config, TrainConfig
from perdure.contract.context import Client, ClientData, Context, Server
from perdure.contract.engine import Engine
from perdure.contract.evaluation import Evaluator
from perdure.contract.exchanges import TaskExchanges, split_exchanges
from perdure.contract.method import Method, Needs
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.core.trees import Tensors, Tree, to_device
from perdure.data.streams import Stream, Task, make_stream
from perdure.engines import make_engine
from perdure.engines.batch_schedule import local_steps
from perdure.engines.schedules import learning_rate
from perdure.methods import build, fill_defaults
from perdure.models.network import Network, make_network
from perdure.models.weights import load_weights
from perdure.privacy.policy import PrivacyPolicy, make_privacy
from perdure.training import client_states
from perdure.training.client_store import ClientStore
from perdure.training.setup import (
    check_method,
    check_tasks,
    check_train,
    make_outputs,
    pick_device,
    with_feature_cache_of,
)
from perdure.training.state import RunState
from perdure.training.task_plan import TaskPlan

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
    rng: Rng
    device: torch.device
    privacy: PrivacyPolicy

    @property
    def tasks(self) -> int:
        """Tasks of the stream."""
        return len(self.stream.tasks)

    def task(self, number: int) -> Task:
        """One task of the stream."""
        return self.stream.tasks[number]

    # ---- where a run is

    def context(self, state: RunState, exchange: int = 0) -> Context:
        """Where in the run a state is."""
        plan, train = self.plan(state), self.config.train
        lr = learning_rate(train, state.task, state.round, max(1, plan.rounds))
        return replace(
            plan.context, round=state.round, rounds=plan.rounds, lr=lr, exchange=exchange
        )

    def plan(self, state: RunState) -> TaskPlan:
        """What is fixed within the current task."""
        if state.task not in self._plans:
            self._plans[state.task] = self.plan_at(state.task, state.server.params)
        return self._plans[state.task]

    def exchanges(self, state: RunState) -> TaskExchanges:
        """What the method does in the current task."""
        return self.plan(state).exchanges

    def rounds(self, state: RunState) -> int:
        """Training rounds of the current task."""
        return self.plan(state).rounds

    def is_personal(self, state: RunState) -> bool:
        """Whether every client has a model of its own."""
        return bool(self.needs.personal or self.exchanges(state).train.private)

    def plan_at(self, task: int, params: Tensors, clients: int | None = None) -> TaskPlan:
        """The plan of a task with a model of these parameters.

        `clients`: those with data of the task, where this process does not know them.
        """
        context = self.context_at(task, params, clients)
        exchanges = split_exchanges(self.method.exchanges(context))
        own = exchanges.train.rounds
        rounds = self.config.rounds(task) if own is None else own
        step = server_lr(self.config.train, self.needs, task)
        return TaskPlan(
            self.task(task), context, exchanges, rounds, step, self._outputs_in_loss, self.device
        )

    def context_at(self, task: int, params: Tensors, clients: int | None = None) -> Context:
        """The context at the beginning of a task; `clients` as in `plan_at`."""
        rounds = self.config.rounds(task)
        shapes = {name: value.shape for name, value in params.items()}
        if clients is None:
            clients = int(np.count_nonzero(self.task(task).partition.sizes))
        return Context(
            self.network_at(task), self.rng, task, 0, rounds,
            learning_rate(self.config.train, task, 0, rounds), self.config.clients.count, clients,
            shapes, default_trainable(tuple(shapes), task),
        )  # fmt: skip

    def network_at(self, task: int) -> Network:
        """The network with the outputs of the tasks so far: it does not show the future."""
        classes = self.network.outputs.task_classes[: task + 1]
        return replace(self.network, outputs=replace(self.network.outputs, task_classes=classes))

    @cached_property
    def needs(self) -> Needs:
        """What the method needs."""
        return self.method.needs

    @cached_property
    def _plans(self) -> dict[int, TaskPlan]:
        return {}

    # ---- the model

    def start(self) -> RunState:
        """The state before the first round."""
        params, buffers = self.network.init(self.rng.torch_generator("init"))
        file = self.config.model.weights_file
        if file:
            params, buffers, report = load_weights(file, params, buffers)
            log.info("%s", report.summary())
        params, buffers = to_device(params, self.device), to_device(buffers, self.device)
        self._check_exchanges(params)
        return RunState(Server(params, buffers, self.method.ServerState()))

    def _check_exchanges(self, params: Tensors) -> None:
        """Refuse before training what the method declares for a task and cannot be done.

        Where nodes hold the data, they are not asked about a task before it comes.
        """
        clients = None if self.stream.agreed is None else self.config.clients.count
        first = self.context_at(0, params, clients=clients)
        for task in range(self.tasks):
            params = self.grow(params, task)
            shapes = {name: value.shape for name, value in params.items()}
            context = replace(
                first, task=task, network=self.network_at(task), parameters=shapes,
                trainable=default_trainable(tuple(shapes), task),
            )  # fmt: skip
            train = split_exchanges(self.method.exchanges(context)).train
            check_train(train, self.needs, self.config, self.privacy.simulated)
            if train.trainable == () and train.rounds != 0:
                raise UserError(
                    f"method: leaves nothing of the model to train in task {task + 1}, allowed: "
                    "options that leave some of it"
                )

    def grow(self, params: Tensors, task: int) -> Tensors:
        """The parameters with the outputs of a task, whose plan is made with them."""
        self._plans.pop(task, None)
        grown = self.network.grow(params, task, self.rng)
        return to_device(grown, self.device) if grown is not params else params

    # ---- clients

    def client(self, number: int, context: Context, server: Server, broadcast: Tree) -> Client:
        """A client as a method sees it in an exchange."""
        state, private = self.client_state(number)
        plan = self._plans.get(context.task) or self.plan_at(context.task, server.params)
        return self.client_with(plan, number, context, server, broadcast, state, private)

    def client_with(
        self,
        plan: TaskPlan,
        number: int,
        context: Context,
        server: Server,
        broadcast: Tree,
        state: Any,
        private: Tensors,
    ) -> Client:
        """A client with this state and these private parameters."""
        train, index = self.config.train, plan.task.partition.index(number).to(self.device)
        chosen = plan.task.client_classes is not None
        active = plan.active_outputs_of(number) if chosen else plan.active_outputs
        data = ClientData(plan.task.train, index, plan.targets, active)
        weight = float(len(index)) if self.weighting == "samples" else 1.0
        params = server.params | private if private else server.params
        return Client(
            number, context, data, state, weight, params, server.buffers, broadcast,
            train.local_epochs, train.batch_size, local_steps(len(index), train), train.momentum,
        )  # fmt: skip

    def client_state(self, number: int) -> tuple[Any, Tensors]:
        """What a client has kept: its state and its private parameters."""
        tree = self.store.get(number)
        if not tree:
            return self.method.ClientState(), {}
        return client_states.read(to_device(tree, self.device), self.method)

    def evaluators(self, state: RunState) -> list[Evaluator]:
        """The models to evaluate: the global one, or one per client if they are personal."""
        server, network = state.server, self.plan(state).context.network
        if not self.is_personal(state):
            return [Evaluator(self.method, server, network, state.task)]
        kept = [self.client_state(client) for client in self.store.clients()]
        return [
            Evaluator(
                self.method, replace(server, params=server.params | own), network, state.task, c
            )
            for c, own in kept or [(self.method.ClientState(), {})]
        ]

    def keep(self, number: int, state: Any, private: Tensors) -> None:
        """Store a client's new state (None: the old one) and its private parameters."""
        tree = client_states.updated(self.store.get(number), state, private, self.method)
        self.store.put(number, tree)

    @cached_property
    def weighting(self) -> str:
        """The weights of the server's mean: samples or uniform."""
        return self.config.train.weighting or self.needs.weighting or "samples"

    @cached_property
    def _outputs_in_loss(self) -> str:
        growing = self.network.outputs.kind == "growing"
        default = "task" if growing else self.needs.active_outputs or "all"
        return self.config.train.outputs or default


def default_trainable(names: tuple[str, ...], task: int) -> tuple[str, ...]:
    """What is trained unless a method says less: of a growing head the newest block alone."""
    newest = f"head.{task}."
    if f"{newest}weight" not in names:
        return names
    return tuple(name for name in names if not name.startswith("head.") or name.startswith(newest))


def server_lr(train: TrainConfig, needs: Needs, task: int) -> float:
    """The server's step size in a task."""
    schedule = train.server_schedule or needs.server_schedule or "constant"
    factors = {"constant": 1.0, "1/k": 1 / (task + 1), "1/sqrt(k)": 1 / math.sqrt(task + 1)}
    return (train.server_lr or needs.server_lr or 1.0) * factors[schedule]


def with_method_defaults(config: Config, method_dir: Path | None = None) -> Config:
    """The config with its method's defaults written out, as those of all other sections are."""
    return config.model_copy(update={"method": fill_defaults(config.method, method_dir)})


def build_experiment(
    config: Config,
    folder: Path | None = None,
    method_dir: Path | None = None,
    engine: Engine | None = None,
    stream: Stream | None = None,
    cache_dir: Path | None = None,
) -> Experiment:
    """Check and build everything that a config names; nothing is written.

    Args:
        config: The experiment.
        folder: Where client states are stored. If None, in memory.
        method_dir: The folder with custom methods. If None, only the working folder is searched.
        engine: Engine to use instead of the one that `config` names.
        stream: Stream to use instead of the one that `config` names. Its tasks are not made before
            they are needed.
        cache_dir: Where cached features are stored, also for other processes. If None, in memory,
            and features of a given stream are not cached.
    """
    method = build(config.method, method_dir)
    check_method(method, config)
    device, rng = pick_device(config.device), Rng(config.seed)
    engine = engine or make_engine(config)
    given = stream = stream or engine.stream(config)
    if stream is None:
        stream = make_stream(config, rng).to(device)
        check_tasks(stream)
    network = make_network(config.model, stream.shape, make_outputs(config, method, stream))
    network = method.wrap_network(network).to(device)
    if given is None or cache_dir is not None:
        stream = with_feature_cache_of(stream, network, cache_dir)
    store = ClientStore(folder)
    privacy = make_privacy(config, method, stream, engine, rng)
    return Experiment(config, method, stream, network, engine, store, rng, device, privacy)
