"""The predictions of a model on one task's test data, and their counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perdure.contract.evaluation_counts import MODES, EvaluationCounts
from perdure.contract.score_counts import count_numbers
from perdure.contract.scores import count_group
from perdure.core.trees import Tensors
from perdure.data.streams import EvalGroup, Task
from perdure.models.outputs import Outputs


@dataclass(frozen=True)
class TaskPredictions:
    """What a model predicts for the test rows of a task."""

    task: Task
    outputs: Outputs
    """The outputs of the network."""
    last_task: int
    """The newest task, from 0."""
    needed_counts: tuple[str, ...]
    """Names of the counts that metrics need."""
    position: Tensor
    """int64 [test rows]: position of each test row among the evaluated ones."""
    logits: dict[str, Tensor]
    """float [evaluated rows, outputs] by mode."""
    routes: Tensor | None
    """int64 [evaluated rows]: the predicted task. None if the method cannot route."""

    def counts(self, client: int | None = None) -> EvaluationCounts:
        """Return the counts over all test rows or, with a client, over those of the client."""
        routes = None if self.routes is None else [0.0] * (self.last_task + 1)
        total = EvaluationCounts(self.task.index, dict.fromkeys(MODES, 0.0), 0.0, routes)
        return sum((self._group_counts(group) for group in self._groups(client)), total)

    def _groups(self, client: int | None) -> Iterator[EvalGroup]:
        for group in self.task.groups:
            if client is None:
                yield group
                continue
            assert self.task.test_clients is not None
            is_held = self.task.test_clients[group.index] == client
            if is_held.any():
                yield replace(group, index=group.index[is_held])

    def _group_counts(self, group: EvalGroup) -> EvaluationCounts:
        rows, weight = self.position[group.index], group.weight
        labels = self.task.test_labels[group.index].cpu()
        correct, sums = dict.fromkeys(MODES, 0.0), {}
        for mode, mask in self._masks(group, rows).items():
            logits = self.logits[mode][rows]
            if self.task.numbers is None:
                predicted = predicted_labels(logits, mask, self.outputs, self.last_task)
                correct[mode] = weight * float((predicted == labels).sum())
            if self.needed_counts:
                sums[mode] = self._sums(logits, mask, labels, weight, mode)
        total = weight * len(group.index)
        return EvaluationCounts(self.task.index, correct, total, self._routed(rows, weight), sums)

    def _sums(
        self, logits: Tensor, mask: Tensor, labels: Tensor, weight: float, mode: str
    ) -> Tensors:
        if self.task.numbers is not None:
            return count_numbers(logits[:, 0], labels, weight, self.task.numbers.std)
        active = logits.masked_fill(~mask, float("-inf"))
        return count_group(
            self.needed_counts, active, labels, weight, self.outputs, self.task.index,
            self.last_task, mode,
        )  # fmt: skip

    def _routed(self, rows: Tensor, weight: float) -> list[float] | None:
        """Return how many rows are predicted to be of each task."""
        if self.routes is None:
            return None
        tasks = self.routes[rows]
        known = torch.bincount(tasks[tasks >= 0], minlength=self.last_task + 1)
        counted: list[float] = (weight * known.double()).tolist()
        return counted

    def _masks(self, group: EvalGroup, rows: Tensor) -> dict[str, Tensor]:
        """Return the active outputs by mode, bool [outputs] or [rows, outputs]."""
        classes = group.classes if self.task.client_classes is not None else None
        masks = {
            "task_agnostic": self.outputs.seen_mask(self.last_task),
            "task_aware": self.outputs.task_mask(self.task.index, self.last_task, classes),
        }
        if self.routes is not None:
            masks["routed"] = routed_mask(self.outputs, self.last_task, self.routes[rows])
        return masks


def routed_mask(outputs: Outputs, last_task: int, routes: Tensor) -> Tensor:
    """Return the active outputs of every row, which are those of its predicted task.

    Args:
        outputs: The outputs of the network.
        last_task: The newest task, from 0.
        routes: Predicted task of every row, int64 [rows]; -1 for no known task, for which the
            outputs of all tasks so far are active.

    Returns:
        bool [rows, outputs].
    """
    masks = [outputs.task_mask(task, last_task) for task in range(last_task + 1)]
    return torch.stack([*masks, outputs.seen_mask(last_task)])[routes]


def predicted_labels(logits: Tensor, mask: Tensor, outputs: Outputs, last_task: int) -> Tensor:
    """Return the label of the largest active output of every row, int64 [rows].

    Args:
        logits: float [rows, outputs].
        mask: Active outputs, bool [outputs] or [rows, outputs].
        outputs: The outputs of the network.
        last_task: The newest task, from 0.
    """
    best = logits.masked_fill(~mask, float("-inf")).argmax(1)
    return outputs.output_labels(last_task)[best]
