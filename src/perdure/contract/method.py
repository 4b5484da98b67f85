"""A method: a frozen dataclass of hyperparameters that declares what happens in a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.needs import Needs
from perdure.contract.uploads import Nothing
from perdure.core.trees import Tree
from perdure.models.network import Network
from perdure.models.ops import ForwardPass

# ---- How well rows fit the tasks so far: what a router decides by

NO_TASK = -1
"""The predicted task of a row that fits no known task."""


def best_tasks(routed: Tensor) -> Tensor:
    """Return the predicted task of each row, int64 [rows], given what `Method.route` returned.

    Args:
        routed: float [rows, tasks], of which the largest score of a row decides; -inf for all tasks
            of a row of no known task, which gets NO_TASK. Or the tasks, int64 [rows].

    """
    if not routed.is_floating_point():
        return routed
    best, tasks = routed.max(1)
    return tasks.masked_fill(best == -torch.inf, NO_TASK)


def task_margins(scores: Tensor) -> Tensor:
    """Return the largest score of each row minus the second largest, float [rows].

    NaN for a row that fits fewer than two tasks.

    Args:
        scores: float [rows, tasks]; -inf for tasks that the row does not fit.

    """
    if scores.shape[1] < 2:
        return scores.new_full((len(scores),), torch.nan)
    first, second = scores.topk(2, dim=1).values.unbind(1)
    return torch.where(second == -torch.inf, torch.nan, first - second)


# ---- What a method says about a run


@dataclass(frozen=True)
class Diagnosis:
    """What a method says about a run, after a round or at a task's end."""

    numbers: Tree = field(default_factory=dict)
    """Plain numbers for events.jsonl."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Sentences about what limits the run, by a key that names the cause. Of each key the first
    sentence is logged, and recorded in events.jsonl and result.json; later ones are ignored."""
    divergence: str = ""
    """Which hyperparameters may make training diverge, their values and what to try. It becomes
    part of a sentence: "likely cause: HINT, or train.lr 0.1 (try 0.03)". Empty if there are
    none."""


# ---- A method: a frozen dataclass of hyperparameters that declares what happens in a task
#
# `exchanges` returns values (Train and Exchange); everything else that a method does is a function
# that one of these values names. All functions are pure: they depend on their arguments and return
# values. A method never uses the engine, the transport, a file, a clock or a global random state.


@dataclass(frozen=True)
class Method:
    """Base class of all methods. With no function overridden it is FedAvg.

    Example:
        >>> from dataclasses import dataclass
        >>> import perdure
        >>> @dataclass(frozen=True)
        ... class Near(perdure.Method):
        ...     strength: float = 0.1
        ...
        ...     def exchanges(self, context):
        ...         return [perdure.Train(prepare=self.pull)]
        ...
        ...     def pull(self, client):
        ...         pull = perdure.Proximal(client.params, self.strength)
        ...         return perdure.Prepared(transforms=(pull,))

    """

    title: ClassVar[str] = ""
    """Name as its paper spells it."""
    family: ClassVar[str] = ""
    """Family under which tables list the method; `References` judge the others."""
    idea: ClassVar[str] = ""
    """What it does, in one line."""
    paper: ClassVar[str] = ""
    """Short reference of the paper."""
    ServerState: ClassVar[type] = Nothing
    """Class of the server state: a dataclass of tensors and plain values, each with a default."""
    ClientState: ClassVar[type] = Nothing
    """Class of the state that each client keeps between rounds, with the same rules."""

    @property
    def needs(self) -> Needs:
        """The requirements and preferences of the method.

        Where they do not depend on hyperparameters, a class variable says them:
        `needs: ClassVar[Needs] = Needs(classes=True)`.
        """
        return Needs()

    def check_config(self, config: Any) -> str | None:
        """Return a sentence why the method cannot run this config, beyond `needs`, or None."""
        return None

    def wrap_network(self, network: Network) -> Network:
        """Return the network that is trained, made from the one that the config names."""
        return network

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Return the exchanges of a task in their order, with exactly one Train.

        It is called once per task, on the server and on clients, and must depend only on the
        context.
        """
        return [Train()]

    def predict(
        self, server: Server, x: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits of a batch, float [rows, outputs].

        By default: `predict_from_features` applied to `predict_features`.

        Args:
            server: The global model, with a client's private parameters in place if there is one.
            x: Examples [rows, ...].
            network: The network with the outputs so far.
            client_state: The client's state, if `Needs.personal`.
            task: The task of the examples, in task-aware evaluation if `Needs.task_aware`.

        """
        features = self.predict_features(server, x, network, client_state, task)
        return self.predict_from_features(server, features, network, client_state, task)

    def predict_features(
        self, server: Server, x: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the head's inputs of a batch, float [rows, feature size].

        The arguments are those of `predict`.
        """
        return network.features(server.params, x, ForwardPass(buffers=server.buffers))

    def predict_from_features(
        self, server: Server, features: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits of the head's inputs `features`, float [rows, feature size].

        The other arguments are those of `predict`.
        """
        return network.classify(server.params, features, ForwardPass(buffers=server.buffers))

    def route(
        self, server: Server, x: Tensor, network: Network, client_state: Any = None
    ) -> Tensor | None:
        """Return how well each row fits each task so far; None if the method cannot route.

        Returns:
            float [rows, tasks]; larger is better, and the largest is the predicted task. A row of
            no known task has -inf for all tasks: its class is predicted among those of all tasks
            so far. A method without such numbers returns the predicted task of each row, int64
            [rows], -1 for a row of no known task.

        """
        return None

    def for_mixed_rows(self) -> Method:
        """Return the method as it predicts rows of several tasks: each row from itself alone.

        By default: the method itself. To be overridden if the prediction of a row depends on its
        batch, which in an evaluation is of one task.
        """
        return self

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        """Return what the method says about the run, after each round and at a task's end."""
        return Diagnosis()
