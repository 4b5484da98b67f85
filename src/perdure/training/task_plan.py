"""The plan of a task: everything about it that is fixed while it is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from perdure.config import Config
from perdure.contract.context import Context
from perdure.contract.exchanges import TaskExchanges, sent_names, trained_names
from perdure.contract.needs import Needs
from perdure.data.streams import Task
from perdure.models.outputs import Outputs
from perdure.training.open_settings import choose_server_lr, choose_server_schedule


@dataclass(frozen=True)
class TaskPlan:
    """Data, exchanges and settings of one task, made once when the task starts."""

    task: Task
    context: Context
    """The context before the task's first round."""
    exchanges: TaskExchanges
    """The exchanges that the method declares for the task."""
    rounds: int
    """Number of training rounds."""
    server_lr: float
    """Step size by which the server scales an aggregated update."""
    outputs_in_loss: str
    """The active outputs: "task", "seen" or "all"."""
    device: torch.device

    @property
    def outputs(self) -> Outputs:
        """The outputs of the network after this task's were added."""
        return self.context.network.outputs

    @cached_property
    def sent(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that clients train and upload, by name."""
        names = sent_names(self.exchanges.train, self.context)
        return {name: self.context.parameters[name] for name in names}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that clients train, private ones included."""
        return trained_names(self.exchanges.train, self.context)

    @cached_property
    def targets(self) -> Tensor:
        """Target of every row of the task's training set.

        int64 [rows], the index of the correct output; or float32 [rows], the standardized number.
        """
        labels, origins = self.task.train_labels, self.task.origins
        if self.outputs.is_number:
            return labels
        if origins is None:
            return self.outputs.targets(self.task.index).to(labels.device)[labels]
        by_task = [self.outputs.targets(task) for task in range(self.task.index + 1)]
        return torch.stack(by_task).to(labels.device)[origins, labels]

    @cached_property
    def active_outputs(self) -> Tensor | None:
        """The outputs that the loss includes, bool [outputs], or None for all of them."""
        if self.outputs_in_loss == "all":
            return None
        if self.outputs_in_loss == "seen" or self.task.origins is not None:
            return self.outputs.seen_mask(self.task.index).to(self.device)
        return self.outputs.task_mask(self.task.index, self.task.index).to(self.device)

    def active_outputs_of(self, client: int) -> Tensor | None:
        """Return the active outputs of one client, which may have its own classes of the task."""
        client_classes = self.task.client_classes
        own = self.outputs_in_loss == "task" and self.task.origins is None
        if client_classes is None or not own:
            return self.active_outputs
        index = self.task.index
        return self.outputs.task_mask(index, index, client_classes(client)).to(self.device)


def default_trainable(
    names: tuple[str, ...], task: int, cumulative: bool = False
) -> tuple[str, ...]:
    """Return the parameters that are trained in a task unless the method chooses fewer.

    These are all of them, except that only the newest block of a growing head is trained unless
    the task has examples of earlier ones.

    Args:
        names: Names of all parameters.
        task: The task, from 0.
        cumulative: Whether tasks have the examples of all tasks so far.
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
