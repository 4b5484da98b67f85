"""One score per class for rows of inputs: what a trained model predicts by.

The prediction is routed if the method can route, else task-agnostic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.contract.context import Server
from perdure.contract.method import Method
from perdure.contract.task_scores import best_tasks
from perdure.models.network import Network
from perdure.models.outputs import Outputs


@dataclass(frozen=True)
class RowScores:
    """What a model knows about some rows."""

    classes: Tensor
    """Score of each class, float [rows, classes]; -inf for classes that cannot be predicted."""
    routes: Tensor | None
    """Predicted task, int64 [rows]; -1 for no known task. None if the method cannot route."""
    tasks: Tensor | None
    """Score of each task, float [rows, tasks]. None if the method has none."""


@dataclass(frozen=True)
class OutputMap:
    """Which outputs belong to which class and to which task, as tensors."""

    by_class: Tensor
    """Outputs of each class, int64 [classes, most outputs of a class]; classes with fewer are
    filled up with the number of outputs."""
    masks: Tensor
    """Outputs of each task so far and, in the last row, of all: bool [tasks + 1, outputs]."""

    @classmethod
    def of(cls, outputs: Outputs, last_task: int) -> OutputMap:
        """Return the map while `last_task` (from 0) is the newest task."""
        tasks = [outputs.task_mask(task, last_task) for task in range(last_task + 1)]
        labels = outputs.output_labels(last_task)
        found = [torch.nonzero(labels == label)[:, 0] for label in range(outputs.classes)]
        by_class = torch.nn.utils.rnn.pad_sequence(found, True, len(labels))
        return cls(by_class, torch.stack([*tasks, outputs.seen_mask(last_task)]))

    def class_scores(self, logits: Tensor, routes: Tensor | None) -> Tensor:
        """Return the largest active output of each class, float [rows, classes]; -inf for none.

        Args:
            logits: float [rows, outputs].
            routes: Predicted task of each row, whose outputs are active; those of all tasks are for
                -1, and for all rows if None.
        """
        active = logits.masked_fill(~self.masks[-1 if routes is None else routes], -torch.inf)
        padded = torch.nn.functional.pad(active, (0, 1), value=-torch.inf)
        return padded[:, self.by_class].amax(2)


def score_rows(
    method: Method, server: Server, network: Network, outputs: OutputMap, x: Tensor
) -> RowScores:
    """Return the scores of normalized rows.

    Args:
        method: The method, which predicts and may route.
        server: The trained model.
        network: The network with the outputs so far.
        outputs: Classes and tasks of the outputs.
        x: Rows, float [rows, ...] or int32 tokens.
    """
    tasks = method.task_scores(server, x, network)
    routes = best_tasks(tasks) if tasks is not None else method.route(server, x, network)
    logits = method.predict(server, x, network)
    return RowScores(outputs.class_scores(logits, routes), routes, tasks)
