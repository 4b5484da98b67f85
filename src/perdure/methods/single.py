"""Single: one model per task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.uploads import CollectedUploads
from perdure.core.trees import Tensors
from perdure.models.network import Network
from perdure.models.ops import ForwardPass


@dataclass(frozen=True)
class Model:
    """Parameters and running statistics by name."""

    params: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class TaskModels:
    """Server state: where every task starts, and the models of the finished tasks."""

    initial: Model = field(default_factory=Model)
    """The run's initial weights."""
    finished: list[Model] = field(default_factory=list)
    """The final model of each finished task."""


@dataclass(frozen=True)
class Single(Method):
    """One model per task: a reference that learns every task alone and forgets nothing.

    Every task starts from the run's initial weights (the pretrained ones, if there are any) and is
    trained by FedAvg; its final model is kept. With the task given (task-aware) an example is
    answered by its task's model, which is how this reference is usually reported. If no task is
    given, the most certain model answers: the one with the largest softmax probability among the
    outputs of its task; numbers are predicted by the newest model. Nothing passes between tasks, so
    a method whose task-aware accuracy is higher transfers something.
    """

    title: ClassVar[str] = "Single"
    family: ClassVar[str] = "References"
    idea: ClassVar[str] = "Every task is learned by a separate model from the initial weights."
    paper: ClassVar[str] = "a reference: FedAvg on each task alone"
    ServerState: ClassVar[type] = TaskModels
    needs: ClassVar[Needs] = Needs(
        prefers=Preferences(active_outputs="task"), prediction_state=("finished",), task_aware=True
    )

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Start again from the initial weights, train, and keep the model."""
        restart = Exchange("restart", participants="none", aggregate=self.restart)
        keep = Exchange("keep", participants="none", aggregate=self.keep)
        return [restart, Train(), keep]

    def restart(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        """Return the server with the initial weights; outputs that a task added are new."""
        if context.task == 0:
            initial = Model(server.params, server.buffers)
            return replace(server, state=replace(server.state, initial=initial))
        initial = server.state.initial
        return replace(server, params=server.params | initial.params, buffers=initial.buffers)

    def keep(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        """Add the model to those of finished tasks."""
        finished = [*server.state.finished, Model(server.params, server.buffers)]
        return replace(server, state=replace(server.state, finished=finished))

    def predict(
        self, server: Server, x: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return log-probabilities of the task's model, or if None of the most certain one.

        The probabilities of a model are those among the outputs of its task; others have none.
        """
        if task is not None:
            return task_log_probabilities(server, task, x, network)
        tasks = range(len(network.outputs.task_classes))
        if network.outputs.is_number:
            return task_log_probabilities(server, tasks[-1], x, network)
        each = [task_log_probabilities(server, number, x, network) for number in tasks]
        return torch.stack(each).amax(0)


def task_log_probabilities(server: Server, task: int, x: Tensor, network: Network) -> Tensor:
    """Return log-probabilities among the outputs of a task by its model, float [rows, outputs].

    Numbers are returned as the model predicts them.
    """
    finished, outputs = server.state.finished, network.outputs
    model = finished[task] if task < len(finished) else Model(server.params, server.buffers)
    logits = network.logits(model.params, x, ForwardPass(buffers=model.buffers))
    if outputs.is_number:
        return logits
    newest = len(outputs.task_classes) - 1
    missing = outputs.count(newest) - logits.shape[1]  # blocks that later tasks added
    mask = outputs.task_mask(task, newest).to(logits.device)
    return F.pad(logits, (0, missing)).masked_fill(~mask, float("-inf")).log_softmax(1)
