"""A method: a frozen dataclass of hyperparameters that declares what happens in a task.

`exchanges` returns values (Train and Exchange); everything else that a method does is a function
that one of these values names. All functions are pure: arguments in, values out. A method never
sees the engine, the transport, a file, a clock or a global random state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.needs import Needs
from perdure.contract.states import Nothing
from perdure.core.trees import Tree
from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network


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
        """Return the logits of a batch: `predict_from_features` applied to `predict_features`.

        Args:
            server: The global model, with a client's private parameters in place if there is one.
            x: Examples [rows, ...].
            network: The network with the outputs so far.
            client_state: The client's state, if `Needs.personal`.
            task: The task of the examples, in task-aware evaluation if `Needs.task_aware`.
        """
        inputs = self.predict_features(server, x, network, client_state, task)
        return self.predict_from_features(server, inputs, network, client_state, task)

    def predict_features(
        self,
        server: Server,
        x: Tensor,
        network: Network,
        client_state: Any = None,
        task: int | None = None,
    ) -> Tensor:
        """Return the head's inputs of a batch, float [rows, D]; arguments as in `predict`."""
        return network.features(server.params, x, ForwardPass(buffers=server.buffers))

    def predict_from_features(
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
