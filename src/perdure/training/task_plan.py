"""What is fixed within a task: its data, what the method does in it, and what both sides know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from perdure.contract.context import Context
from perdure.contract.exchanges import TaskExchanges, sent_names, trained_names
from perdure.data.streams import Task
from perdure.models.outputs import Outputs


@dataclass(frozen=True)
class TaskPlan:
    """One task of a run, worked out once when it begins."""

    task: Task
    context: Context
    """As the task begins: before its first round."""
    exchanges: TaskExchanges
    rounds: int
    """Training rounds: the method's, or the config's."""
    server_lr: float
    """The server's step size."""
    outputs_in_loss: str
    """Which outputs are active: task, seen or all."""
    device: torch.device

    @property
    def outputs(self) -> Outputs:
        """The network's outputs so far."""
        return self.context.network.outputs

    @cached_property
    def sent(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that are trained and travel."""
        names = sent_names(self.exchanges.train, self.context)
        return {name: self.context.parameters[name] for name in names}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that are trained."""
        return trained_names(self.exchanges.train, self.context)

    @cached_property
    def targets(self) -> Tensor:
        """The output that should win for each row of the task's training set."""
        labels = self.task.train_labels
        return self.outputs.targets(self.task.index).to(labels.device)[labels]

    @cached_property
    def active_outputs(self) -> Tensor | None:
        """The outputs in the loss; None: all of them."""
        if self.outputs_in_loss == "all":
            return None
        if self.outputs_in_loss == "seen":
            return self.outputs.seen_mask(self.task.index).to(self.device)
        return self.outputs.task_mask(self.task.index, self.task.index).to(self.device)

    def active_outputs_of(self, client: int) -> Tensor | None:
        """The outputs in one client's loss, where clients choose their classes themselves."""
        if self.task.client_classes is None or self.outputs_in_loss != "task":
            return self.active_outputs
        index, chosen = self.task.index, self.task.client_classes(client)
        return self.outputs.task_mask(index, index, chosen).to(self.device)
