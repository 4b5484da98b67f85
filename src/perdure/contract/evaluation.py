"""Accuracy on every task so far, in three modes of inference.

task_agnostic: the prediction is the best of all outputs of the tasks seen so far.
task_aware:    the best of the outputs of the example's own task, which is told.
routed:        the best of the outputs of the task that the method predicts for the example.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from perdure.contract.context import Server
from perdure.contract.method import Method
from perdure.data.streams import EvalGroup, Task
from perdure.models.network import Network
from perdure.models.outputs import Outputs

MODES = ("task_agnostic", "task_aware", "routed")
_ROWS = 1024


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on one task, by mode; None where the method cannot route."""

    accuracy: dict[str, float | None]
    routing: float | None
    """Share of the examples whose task was told rightly."""
    predicted_tasks: list[float] | None = None
    """Share of the examples that were told to be of each task so far."""


@dataclass(frozen=True)
class EvaluationCounts:
    """Weighted numbers of a task's test examples: all, and those answered rightly in each mode."""

    task: int
    correct: dict[str, float]
    total: float
    predicted_tasks: list[float] | None
    """Examples that were told to be of each task so far; None: the method cannot route."""

    def __add__(self, other: EvaluationCounts) -> EvaluationCounts:
        correct = {mode: value + other.correct[mode] for mode, value in self.correct.items()}
        predicted_tasks = None
        if self.predicted_tasks is not None and other.predicted_tasks is not None:
            predicted_tasks = [
                a + b for a, b in zip(self.predicted_tasks, other.predicted_tasks, strict=True)
            ]
        return EvaluationCounts(self.task, correct, self.total + other.total, predicted_tasks)

    def evaluation(self) -> Evaluation:
        """The shares."""
        found = {mode: value / self.total for mode, value in self.correct.items()}
        if self.predicted_tasks is None:
            return Evaluation({**found, "routed": None}, None)
        shares = [value / self.total for value in self.predicted_tasks]
        return Evaluation({**found}, shares[self.task], shares)


@dataclass(frozen=True)
class Evaluator:
    """A trained model under test after a task."""

    method: Method
    server: Server
    network: Network
    last_task: int
    client_state: Any = None
    """The state of the client whose model this is; None: it is the global model."""

    def evaluate(self, task: Task) -> Evaluation:
        """Accuracy on a task's test groups, weighted as the stream says."""
        return self.counts(task).evaluation()

    def counts(self, task: Task) -> EvaluationCounts:
        """What a score is made of: sums, to which those of other holders of data can be added."""
        rows = torch.unique(torch.cat([group.index for group in task.groups]))
        logits, routes = self._outputs(task, rows)
        place = torch.zeros(len(task.test_labels), dtype=torch.int64)
        place[rows] = torch.arange(len(rows))
        totals = dict.fromkeys(MODES, 0.0)
        predicted_tasks = torch.zeros(self.last_task + 1, dtype=torch.float64)
        count = 0.0
        for group in task.groups:
            at, labels = place[group.index], task.test_labels[group.index]
            for mode, mask in self._masks(task, group, routes, at).items():
                correct = self._correct(logits[mode][at], mask, labels)
                totals[mode] += group.weight * correct
            if routes is not None:
                predicted_tasks += (
                    group.weight
                    * torch.bincount(routes[at], minlength=len(predicted_tasks)).double()
                )
            count += group.weight * len(group.index)
        return EvaluationCounts(
            task.index, totals, count, predicted_tasks.tolist() if routes is not None else None
        )

    def _outputs(self, task: Task, rows: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Logits by mode, and the predicted task of each row."""
        logits, aware, routes = [], [], []
        for part in torch.split(rows, _ROWS):
            index = part.to(task.test.rows.device)
            x, network = (
                task.test.gather(index),
                self.network.with_cached_features(task.test.gather_cached(index)),
            )
            logits.append(self._predict(x, network))
            if self.method.needs.task_aware:
                aware.append(self._predict(x, network, task.index))
            route = self.method.route(self.server, x, network, self.client_state)
            if route is not None:
                routes.append(route.cpu())
        agnostic = torch.cat(logits)
        by_mode = dict.fromkeys(MODES, agnostic)
        if aware:
            by_mode["task_aware"] = torch.cat(aware)
        return by_mode, torch.cat(routes) if routes else None

    def _predict(self, x: Tensor, network: Network, task: int | None = None) -> Tensor:
        return self.method.predict(self.server, x, network, self.client_state, task).cpu()

    def _masks(
        self, task: Task, group: EvalGroup, routes: Tensor | None, at: Tensor
    ) -> dict[str, Tensor]:
        outputs = self.network.outputs
        own = group.classes if task.client_classes is not None else None
        masks = {
            "task_agnostic": outputs.seen_mask(self.last_task),
            "task_aware": outputs.task_mask(task.index, self.last_task, own),
        }
        if routes is not None:
            masks["routed"] = routed_mask(outputs, self.last_task, routes[at])
        return masks

    def _correct(self, logits: Tensor, mask: Tensor, labels: Tensor) -> float:
        predicted = predicted_labels(logits, mask, self.network.outputs, self.last_task)
        return float((predicted == labels.cpu()).sum())


def routed_mask(outputs: Outputs, last_task: int, routes: Tensor) -> Tensor:
    """Return the active outputs of every row, which are those of its predicted task.

    Args:
        outputs: The outputs of the network.
        last_task: The newest task, from 0.
        routes: Predicted task of every row, int64 [rows].

    Returns:
        bool [rows, outputs].
    """
    masks = [outputs.task_mask(task, last_task) for task in range(last_task + 1)]
    return torch.stack(masks)[routes]


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


def mean_evaluation(evaluators: list[Evaluator], task: Task) -> Evaluation:
    """Accuracy on a task, averaged over models that are all judged on the same test data."""
    return reduce(add, (evaluator.counts(task) for evaluator in evaluators)).evaluation()
