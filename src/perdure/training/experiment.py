"""An experiment: the objects that a config names, built and checked before training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import (
    TaskExchanges,
    sent_names,
    split_exchanges,
    trained_names,
)
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.core.trees import Tensors, Tree, to_device
from perdure.data.feature_cache import CacheFolder, with_feature_cache
from perdure.data.images import make_augmentation
from perdure.data.streams.build import make_stream, with_client_count
from perdure.data.streams.stream import Stream, Task
from perdure.evaluation.metrics import Metric, make_metrics
from perdure.methods.registry import build
from perdure.models.layers import BodySetup
from perdure.models.network import Network, Outputs, make_network
from perdure.models.ops import ForwardPass
from perdure.models.prompts import Prompted
from perdure.models.weights import load_weights
from perdure.privacy.chain import PrivacyChain, make_chain
from perdure.training.checks import (
    check_augmentation,
    check_engine,
    check_exchanges,
    check_method,
    check_tasks,
    warn_of_unprotected,
)
from perdure.training.client_store import ClientStore, from_stored_tree, to_stored_tree
from perdure.training.collector import capped_sizes
from perdure.training.engines import make_engine
from perdure.training.engines.engine import Engine
from perdure.training.optimizers import learning_rate
from perdure.training.settings import choose_head, choose_outputs, choose_weighting
from perdure.training.state import RunState
from perdure.training.task_plan import (
    TaskPlan,
    active_outputs,
    default_trainable,
    mean_local_steps,
    server_step_size,
    task_targets,
)

# ---- Parts of an experiment that its config chooses: device, outputs of the head, feature cache.


def choose_device(name: str) -> torch.device:
    """Return the device of `config.device`; `auto` chooses a GPU if there is one."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    gpus = [kind for kind, is_available in available.items() if is_available]
    if name == "auto":
        return torch.device(next(iter(gpus), "cpu"))
    if not available.get(name, True):
        raise bad_value("device", name, f"{', '.join(['auto', 'cpu', *gpus])} on this machine")
    return torch.device(name)


def make_outputs(config: Config, method: Method, stream: Stream) -> Outputs:
    """Return the outputs of the head that `model.head` or else the method chooses."""
    kind = choose_head(config, method.needs)
    is_number = config.data.target == "number"
    return Outputs(kind, stream.classes, stream.task_classes, stream.known_classes, is_number)


def first_rows(stream: Stream, count: int = 6) -> Tensor:
    """Return the first training rows of the first task, [at most `count`, ...]."""
    inputs = stream.tasks[0].train
    return inputs.gather(torch.arange(min(count, len(inputs)), device=inputs.device))


def network_of(
    config: Config, method: Method, stream: Stream, rows: Tensor | None, folder: Path | None
) -> Network:
    """Return the network of a config as the method trains it."""
    setup = BodySetup(folder, Rng(config.seed).key("init"), rows)
    outputs = make_outputs(config, method, stream)
    network = method.wrap_network(make_network(config.model, stream.shape, outputs, setup=setup))
    warn_of_unprotected(method.needs, network)
    return network


def cache_frozen_features(stream: Stream, network: Network, folder: Path | None = None) -> Stream:
    """Return the stream with a cache for the features of a frozen backbone."""
    body = network.body
    if not (isinstance(body, Prompted) and body.caches_queries):
        return stream
    backbone = body.card
    cache = CacheFolder(folder, backbone["sha256"]) if folder is not None and backbone else None
    return with_feature_cache(
        stream, lambda x: body.query(x, ForwardPass()), body.feature_size, cache
    )


# ---- An experiment: the objects that a config names, built and checked before training

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Experiment:
    """The objects of a run that do not change. A `RunState` holds those that do."""

    config: Config
    method: Method
    stream: Stream
    network: Network
    """The network with the outputs of all tasks; see `network_at`."""
    engine: Engine
    store: ClientStore
    """The client states. It is the one part that changes while a run trains."""
    rng: Rng
    device: torch.device
    privacy: PrivacyChain
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of predictions by name; none if only accuracy is measured."""

    @property
    def task_count(self) -> int:
        """Number of tasks of the stream."""
        return len(self.stream.tasks)

    def task(self, index: int) -> Task:
        """Return one task of the stream, from 0."""
        return self.stream.tasks[index]

    def config_at(self, task: int) -> Config:
        """Return the config as it holds in a task, with the settings of its extension."""
        if task not in self._configs:
            self._configs[task] = self.config.at(task)
        return self._configs[task]

    @cached_property
    def _configs(self) -> dict[int, Config]:
        return {}

    @cached_property
    def needs(self) -> Needs:
        """The needs of the method."""
        return self.method.needs

    @cached_property
    def weighting(self) -> str:
        """The clients' weights in the server's mean: "samples" or "uniform"."""
        return choose_weighting(self.config, self.needs)

    @property
    def min_rows(self) -> int:
        """Rows that a client, or a class of it, must have for anything to be sent about them."""
        return self.config.privacy.min_rows or 0

    # ---- tasks

    def plan(self, state: RunState) -> TaskPlan:
        """Return the plan of the current task."""
        if state.task not in self._plans:
            self._plans[state.task] = self.plan_task(state.task, state.server.params)
        return self._plans[state.task]

    @cached_property
    def _plans(self) -> dict[int, TaskPlan]:
        return {}

    def context(self, state: RunState, exchange: int = 0) -> Context:
        """Return the context of the current round."""
        return self.plan(state).at(state.round, exchange)

    def exchanges(self, state: RunState) -> TaskExchanges:
        """Return the exchanges of the current task."""
        return self.plan(state).exchanges

    def is_personal(self, state: RunState) -> bool:
        """Return whether every client has a personal model in the current task."""
        return bool(self.needs.personal or self.plan(state).train.private)

    def plan_task(self, task: int, params: Tensors, clients: int | None = None) -> TaskPlan:
        """Return the plan of a task; for nodes with the number of clients that have data of it.

        Raises:
            ContractError: The method declares exchanges that cannot be run.

        """
        context, config = self.task_context(task, params, clients), self.config_at(task)
        exchanges = split_exchanges(self.method.exchanges(context))
        train, data, outputs = exchanges.train, self.task(task), context.network.outputs
        trainable, sent = trained_names(train, context), sent_names(train, context)
        in_loss = choose_outputs(self.config, self.needs)
        active = active_outputs(data, outputs, in_loss)
        return TaskPlan(
            data,
            config,
            context,
            exchanges,
            train,
            self.config.rounds(task) if train.rounds is None else train.rounds,
            server_step_size(config, self.needs, task),
            trainable,
            {name: context.parameters[name] for name in sent},
            task_targets(data, outputs),
            None if active is None else active.to(self.device),
            in_loss == "task" and data.client_classes is not None and data.train.origins is None,
            self.weighting,
            None if config.train.aggregation.is_sum else config.train.aggregation,
            config.federation is not None or config.privacy.secagg,
            make_augmentation(config.data),
            config.train.momentum,
            self.device,
        )

    def task_context(self, task: int, params: Tensors, clients: int | None = None) -> Context:
        """Return the context at the start of a task; arguments as in `plan_task`."""
        rounds, config = self.config.rounds(task), self.config_at(task)
        shapes = {name: value.shape for name, value in params.items()}
        sizes = self.task(task).partition.sizes if clients is None else np.zeros(0)
        steps = mean_local_steps(capped_sizes(self.config, sizes), config.train)
        clients = int(np.count_nonzero(sizes)) if clients is None else clients
        trainable = default_trainable(tuple(shapes), task, self.config.stream.cumulative)
        return Context(
            self.network_at(task), self.rng, task, 0, rounds,
            learning_rate(config.train, task, 0, rounds), config.clients.count, clients,
            shapes, trainable, needs=self.needs, local_steps=steps,
            earlier_rounds=self.config.total_rounds(task),
        )  # fmt: skip

    def network_at(self, task: int) -> Network:
        """Return the network with the outputs of the tasks up to `task`, from 0."""
        return replace(self.network, outputs=self.network.outputs.until(task))

    # ---- the model

    def initial_state(self) -> RunState:
        """Return the state before the first round.

        Raises:
            UserError: `model.weights_file` does not fit the network, or the method's exchanges
                cannot be run with this config.

        """
        params, buffers = self.network.init(self.rng.torch_generator("init"))
        file = self.config.model.weights_file
        if file:
            params, buffers, report = load_weights(file, params, buffers)
            log.info("%s", report.summary())
        params, buffers = to_device(params, self.device), to_device(buffers, self.device)
        check_exchanges(self, params)
        return RunState(Server(params, buffers, self.method.ServerState()))

    def grow(self, params: Tensors, task: int) -> Tensors:
        """Return the parameters with the outputs of a task added, if the head is a growing one."""
        self._plans.pop(task, None)  # made with other parameters
        grown = self.network.grow(params, task, self.rng)
        return to_device(grown, self.device) if grown is not params else params

    # ---- clients

    def client(self, index: int, context: Context, server: Server, broadcast: Tree) -> Client:
        """Return a client, with its stored state, as a method's functions receive it."""
        plan = self._plans.get(context.task) or self.plan_task(context.task, server.params)
        return plan.client(index, context, server, broadcast, *self.client_state(index))

    def client_state(self, index: int) -> tuple[Any, Tensors]:
        """Return the stored state and private parameters of a client, or their defaults."""
        tree = self.store.get(index)
        if not tree:
            return self.method.ClientState(), {}
        return from_stored_tree(to_device(tree, self.device), self.method)

    def store_client_state(self, index: int, state: Any, private: Tensors) -> None:
        """Store a client's new state (if None, the previous one) and its private parameters."""
        tree = to_stored_tree(self.store.get(index), state, private, self.method)
        self.store.put(index, tree)


def build_experiment(
    config: Config,
    folder: Path | None = None,
    method_dir: Path | None = None,
    engine: Engine | None = None,
    stream: Stream | None = None,
    cache_dir: Path | None = None,
    method: Method | None = None,
) -> Experiment:
    """Check and build everything that a config names; nothing is written.

    The config's method is built unless it is given.

    Raises:
        UserError: The config or a file that it names is invalid.

    """
    config = with_client_count(config)
    method = method or build(config.method, method_dir)
    for task in (0, *config.extension_starts):
        check_method(method, config.at(task))
    metrics = _metrics(config, method_dir)
    device, rng = choose_device(config.device), Rng(config.seed)
    engine = engine or make_engine(config)
    given = stream = stream or engine.stream(config)
    if stream is None:
        stream = make_stream(config, rng).to(device)
        check_tasks(stream, config)
    privacy = make_chain(config, engine.in_process)
    stream = privacy.limit_rows(stream, is_whole=given is None)
    check_augmentation(stream, config)
    rows = None if given is not None else first_rows(stream)
    network = network_of(config, method, stream, rows, method_dir).to(device)
    if (given is None or cache_dir is not None) and not config.data.augment:
        stream = cache_frozen_features(stream, network, cache_dir)
    store = ClientStore(folder)
    check_engine(config, privacy, engine)
    privacy.prepare(method, stream, engine, rng)
    return Experiment(config, method, stream, network, engine, store, rng, device, privacy, metrics)


def _metrics(config: Config, folder: Path | None) -> dict[str, Metric]:
    """Return the metrics that are computed; clients are scored where the data names them."""
    by_client = config.clients.partition.is_natural
    return make_metrics(config.evaluate.metrics, config.data.target, by_client, folder)
