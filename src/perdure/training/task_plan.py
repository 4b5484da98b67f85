"""The plan of a task: everything about it that is fixed while it is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from perdure.config import Config, TrainConfig
from perdure.config.train import Aggregation
from perdure.contract.context import Client, ClientData, Context, Server
from perdure.contract.exchanges import TaskExchanges, Train
from perdure.contract.needs import Needs
from perdure.contract.uploads import Losses
from perdure.core.trees import Tensors, Tree
from perdure.data.examples import Array
from perdure.data.images import Augmentation
from perdure.data.streams.stream import Task
from perdure.models.network import Outputs
from perdure.training.local_training import LocalTraining
from perdure.training.optimizers import learning_rate
from perdure.training.settings import choose_server_lr, choose_server_schedule


@dataclass(frozen=True)
class TaskPlan:
    """Data, exchanges and settings of one task, made once when the task starts."""

    task: Task
    config: Config
    """The config as it holds in the task."""
    context: Context
    """The context before the task's first round."""
    exchanges: TaskExchanges
    """The exchanges that the method declares for the task."""
    train: Train
    """The training among them."""
    rounds: int
    """Number of training rounds."""
    server_lr: float
    """Step size by which the server scales an aggregated update."""
    trainable: tuple[str, ...]
    """Names of the parameters that clients train, private ones included."""
    sent: dict[str, torch.Size]
    """Shapes of the parameters that clients train and upload, by name."""
    targets: Tensor
    """Target of every row of the task's training set: int64 [rows], the index of the correct
    output; or float32 [rows], the standardized number."""
    active_outputs: Tensor | None
    """The outputs that the loss includes, bool [outputs], or None for all of them."""
    own_outputs: bool
    """Whether the loss of a client includes the outputs of its own classes alone."""
    weighting: str
    """The clients' weights in the server's mean: "samples" or "uniform"."""
    rule: Aggregation | None
    """How updates become one. If None, they are summed."""
    bounded: bool
    """Whether the weights of clients are bounded: in a federation, and in secure sums."""
    augmentation: Augmentation | None
    """Random changes of the images in local steps. If None, there are none."""
    momentum: float
    """The momentum of the clients' optimizer; 0 if it has none."""

    device: torch.device

    def at(self, round_: int, exchange: int = 0) -> Context:
        """Return the context of a round, or of an exchange after this number of rounds."""
        lr = learning_rate(self.config.train, self.task.index, round_, max(1, self.rounds))
        return replace(self.context, round=round_, rounds=self.rounds, lr=lr, exchange=exchange)

    def client(
        self,
        index: int,
        context: Context,
        server: Server,
        broadcast: Tree,
        state: Any,
        private: Tensors,
    ) -> Client:
        """Return a client with this state and these private parameters."""
        train, rows = self.config.train, self.task.partition.index(index).to(self.device)
        active = self.active_outputs_of(index) if self.own_outputs else self.active_outputs
        return Client(
            index,
            context,
            ClientData(self.task.train, rows, self.targets, active),
            state,
            float(len(rows)) if self.weighting == "samples" else 1.0,
            server.params | private if private else server.params,
            server.buffers,
            broadcast,
            train.local_epochs,
            train.batch_size,
            local_steps(len(rows), train),
            self.momentum,
            train.optimizer.sums_gradients,
            min_rows=self.config.privacy.min_rows or 0,
        )

    def local_training(
        self,
        context: Context,
        server: Server,
        broadcast: Tree,
        per_client_fields: tuple[str, ...],
        losses: Losses,
    ) -> LocalTraining:
        """Return what all clients of a round share; engines fill in the losses."""
        return LocalTraining(
            self.train, context, self.config.train, server.params, server.buffers, broadcast,
            per_client_fields, augmentation=self.augmentation, losses=losses,
        )  # fmt: skip

    def active_outputs_of(self, client: int) -> Tensor | None:
        """Return the active outputs of one client, which may have its own classes of the task."""
        classes, index = self.task.client_classes, self.task.index
        if classes is None or not self.own_outputs:
            return self.active_outputs
        outputs = self.context.network.outputs
        return outputs.task_mask(index, index, classes(client)).to(self.device)


def task_targets(task: Task, outputs: Outputs) -> Tensor:
    """Return the target of every row of a task's training set (see `TaskPlan.targets`)."""
    labels, origins = task.train.y, task.train.origins
    if outputs.is_number:
        return labels
    if origins is None:
        return outputs.targets(task.index).to(labels.device)[labels]
    by_task = [outputs.targets(earlier) for earlier in range(task.index + 1)]
    return torch.stack(by_task).to(labels.device)[origins, labels]


def active_outputs(task: Task, outputs: Outputs, in_loss: str) -> Tensor | None:
    """Return the outputs that the loss includes, given `train.outputs`: all, seen or task."""
    if in_loss == "all":
        return None
    if in_loss == "seen" or task.train.origins is not None:
        return outputs.seen_mask(task.index)
    return outputs.task_mask(task.index, task.index)


def local_steps(rows: int, config: TrainConfig) -> int:
    """Return the number of local steps per round of a client with `rows` examples."""
    steps = -(-rows // config.batch_size) * config.local_epochs
    return steps if config.max_steps is None else min(steps, config.max_steps)


def mean_local_steps(sizes: Array, config: TrainConfig) -> float:
    """Return the local steps of a round, the mean over clients with data.

    Args:
        sizes: Examples of each client, int64 [clients].
        config: The `train` section.

    """
    steps = [local_steps(int(size), config) for size in sizes if size]
    return sum(steps) / len(steps) if steps else 0.0


def default_trainable(
    names: tuple[str, ...], task: int, cumulative: bool = False
) -> tuple[str, ...]:
    """Return the parameters that are trained in a task unless the method chooses fewer.

    These are all of them, except that only the newest block of a growing head is trained unless
    the task has examples of earlier ones.
    """
    newest = f"head.{task}."
    is_growing = f"{newest}weight" in names and "head.weight" not in names
    if cumulative or not is_growing:
        return names
    return tuple(name for name in names if not name.startswith("head.") or name.startswith(newest))


def server_step_size(config: Config, needs: Needs, task: int) -> float:
    """Return the server's step size in a task, from 0, by `train.server_lr` and its schedule."""
    schedule = choose_server_schedule(config, needs)
    factors = {"constant": 1.0, "1/k": 1 / (task + 1), "1/sqrt(k)": 1 / math.sqrt(task + 1)}
    return choose_server_lr(config, needs) * factors[schedule]
