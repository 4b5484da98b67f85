"""A method: a frozen dataclass of hyperparameters that declares what happens in a task.

`exchanges` returns values (Train and Exchange); everything else that a method does is a function
that one of these values names. All functions are pure: arguments in, values out. A method never
sees the engine, the transport, a file, a clock or a global random state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor

from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.states import Nothing
from perdure.core.trees import Tree
from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network

ALL_STREAMS = frozenset({"permuted", "split", "domains", "pool"})


@dataclass(frozen=True)
class Needs:
    """What a method needs, as data. None: no preference."""

    streams: frozenset[str] = ALL_STREAMS
    """Kinds of streams that it can learn."""
    head: Mapping[str, Literal["shared", "growing"]] = field(default_factory=dict)
    """The head by kind of stream. Default: shared."""
    active_outputs: Literal["all", "seen", "task"] | None = None
    """The outputs included in the loss under a shared head. Default: all."""
    weighting: Literal["samples", "uniform"] | None = None
    """Weights of the server's mean. Default: samples."""
    server_lr: float | None = None
    """Server step size. Default: 1."""
    server_schedule: Literal["constant", "1/k", "1/sqrt(k)"] | None = None
    """Factor on the server step size in task k = 1, 2, ... Default: constant."""
    max_client_weight: float = 1.0
    """The largest weight of a Sum, as a multiple of the client's own."""
    per_client_fields: tuple[str, ...] = ()
    """Fields that are sent as Each; every Each is checked against it."""
    prediction_state: tuple[str, ...] = ()
    """Fields of the server state that `predict` and `route` read; a trained model exports them."""
    trained_layers: bool = False
    """Whether it works on layers that are trained, so that it cannot combine with prompts."""
    personal: bool = False
    """Whether `predict` or `route` use the client's state, so that every client is evaluated."""
    task_aware: bool = False
    """Whether `predict` uses `task`, so that task-aware evaluation calls it with the task."""


@dataclass(frozen=True)
class Method:
    """A method. As it stands it is FedAvg."""

    paper: ClassVar[str] = ""
    ServerState: ClassVar[type] = Nothing
    """What the server keeps: a dataclass of tensors and plain values, each with a default."""
    ClientState: ClassVar[type] = Nothing
    """What each client keeps, likewise."""

    @property
    def needs(self) -> Needs:
        """What it needs."""
        return Needs()

    def check_config(self, config: Any) -> str | None:
        """Return a reason why it cannot run this config, beyond `needs`; else None."""
        return None

    def wrap_network(self, network: Network) -> Network:
        """Return the network that is trained, made from the one that the config names."""
        return network

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Return what happens in a task, in this order, with exactly one Train.

        It is called once per task, on the server and on clients: it must depend on the context
        alone.
        """
        return [Train()]

    def predict(
        self,
        server: Server,
        x: Tensor,
        network: Network,
        client_state: Any = None,
        task: int | None = None,
    ) -> Tensor:
        """Return the logits of a batch: `classify` applied to `features`.

        Args:
            server: The global model, with a client's private parameters in place if there is one.
            x: Examples [rows, ...].
            network: The network with the outputs so far.
            client_state: The client's state, if `Needs.personal`.
            task: The task of the examples, in task-aware evaluation if `Needs.task_aware`.
        """
        inputs = self.features(server, x, network, client_state, task)
        return self.classify(server, inputs, network, client_state, task)

    def features(
        self,
        server: Server,
        x: Tensor,
        network: Network,
        client_state: Any = None,
        task: int | None = None,
    ) -> Tensor:
        """Return the head's inputs of a batch, float [rows, D]; arguments as in `predict`."""
        return network.features(server.params, x, ForwardPass(buffers=server.buffers))

    def classify(
        self,
        server: Server,
        features: Tensor,
        network: Network,
        client_state: Any = None,
        task: int | None = None,
    ) -> Tensor:
        """Return the logits of features [rows, D]; other arguments as in `predict`."""
        return network.classify(server.params, features, ForwardPass(buffers=server.buffers))

    def route(
        self, server: Server, x: Tensor, network: Network, client_state: Any = None
    ) -> Tensor | None:
        """Return the predicted task of each row, int64 [rows]; None if the method cannot route."""
        return None

    def diagnostics(self, server: Server, context: Context) -> Tree:
        """Return plain numbers for events.jsonl, after each round and at a task's end."""
        return {}
