"""Accuracy and other metrics on every task so far, in three inference modes.

task_agnostic: the prediction is the best of all outputs of the tasks seen so far.
task_aware:    the best of the outputs of the example's task, which is given.
routed:        the best of the outputs of the task that the method predicts for the example; of all
               tasks seen so far if it predicts that the example is of no known task (-1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from perdure.contract.context import Server
from perdure.contract.method import Method
from perdure.contract.metrics.metric import Metric
from perdure.contract.scores import MetricValues, TaskScores, add_sums, count_group
from perdure.core.trees import Tensors
from perdure.data.streams import EvalGroup, Task
from perdure.models.network import Network
from perdure.models.outputs import Outputs

MODES = ("task_agnostic", "task_aware", "routed")
"""Inference modes, as result.json names them."""
_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on one task."""

    accuracy: dict[str, float | None]
    """Fraction of correct predictions by mode. `routed` is None if the method cannot route."""
    routing: float | None
    """Fraction of examples whose task was predicted correctly. None if the method cannot route."""
    predicted_tasks: list[float] | None = None
    """Fraction of examples predicted to be of each task so far; the rest is of no known task."""
    scores: MetricValues = field(default_factory=dict)
    """Value of each metric by mode."""
    client_scores: dict[int, MetricValues] = field(default_factory=dict)
    """The same of each client with local test data or a personal model."""


@dataclass(frozen=True)
class EvaluationCounts:
    """Weighted numbers of test examples of one task, which can be added to those of others."""

    task: int
    """Index of the task, from 0."""
    correct: dict[str, float]
    """Correctly predicted examples by mode."""
    total: float
    """All examples."""
    predicted_tasks: list[float] | None
    """Examples predicted to be of each task so far. None if the method cannot route."""
    sums: dict[str, Tensors] = field(default_factory=dict)
    """Counts that the metrics need, by mode and name; see `perdure.contract.score_counts`."""

    def __add__(self, other: EvaluationCounts) -> EvaluationCounts:
        correct = {mode: value + other.correct[mode] for mode, value in self.correct.items()}
        predicted_tasks = None
        if self.predicted_tasks is not None and other.predicted_tasks is not None:
            predicted_tasks = [
                a + b for a, b in zip(self.predicted_tasks, other.predicted_tasks, strict=True)
            ]
        sums = {mode: add_sums(value, other.sums[mode]) for mode, value in self.sums.items()}
        total = self.total + other.total
        return EvaluationCounts(self.task, correct, total, predicted_tasks, sums)

    def evaluation(self) -> Evaluation:
        """Return the counts as fractions of all examples."""
        accuracy = {mode: value / self.total for mode, value in self.correct.items()}
        if self.predicted_tasks is None:
            return Evaluation({**accuracy, "routed": None}, None)
        fractions = [value / self.total for value in self.predicted_tasks]
        return Evaluation({**accuracy}, fractions[self.task], fractions)


@dataclass(frozen=True)
class Evaluator:
    """Measures a trained model on test data after a task."""

    method: Method
    """The method, which predicts."""
    server: Server
    """The model, with a client's private parameters in place if it is a client's."""
    network: Network
    """The network with the outputs so far."""
    last_task: int
    """Index of the last trained task, from 0."""
    client_state: Any = None
    """State of the client whose model this is. If None, this is the global model."""
    client: int | None = None
    """The client whose model this is. If None, this is the global model."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics to compute beside accuracy, by name."""
    needed_counts: tuple[str, ...] = ()
    """Names of the counts that the metrics need."""

    def evaluate(self, task: Task) -> Evaluation:
        """Return the accuracy on a task's test groups, weighted by the stream's group weights."""
        return self.counts(task).evaluation()

    def counts(self, task: Task) -> EvaluationCounts:
        """Return evaluation counts, which can be added to those of other clients."""
        rows = torch.unique(torch.cat([group.index for group in task.groups]))
        logits, routes = self._outputs(task, rows)
        position = torch.zeros(len(task.test_labels), dtype=torch.int64)
        position[rows] = torch.arange(len(rows))
        totals = dict.fromkeys(MODES, 0.0)
        sums: dict[str, Tensors] = {}
        predicted_tasks = torch.zeros(self.last_task + 1, dtype=torch.float64)
        count = 0.0
        for group in task.groups:
            group_rows, labels = position[group.index], task.test_labels[group.index]
            for mode, mask in self._masks(task, group, routes, group_rows).items():
                correct = self._correct(logits[mode][group_rows], mask, labels)
                totals[mode] += group.weight * correct
                if self.needed_counts:
                    active = logits[mode][group_rows].masked_fill(~mask, float("-inf"))
                    counted = self._sums(active, labels.cpu(), group.weight, task.index, mode)
                    sums[mode] = add_sums(sums.get(mode, {}), counted)
            if routes is not None:
                group_tasks = routes[group_rows]
                known = torch.bincount(group_tasks[group_tasks >= 0], minlength=self.last_task + 1)
                predicted_tasks += group.weight * known.double()
            count += group.weight * len(group.index)
        return EvaluationCounts(
            task.index, totals, count, predicted_tasks.tolist() if routes is not None else None,
            sums,
        )  # fmt: skip

    def _outputs(self, task: Task, rows: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the logits by mode, and the predicted task of each row."""
        logits, aware, routes = [], [], []
        for batch_rows in torch.split(rows, _BATCH_ROWS):
            index = batch_rows.to(task.test.device)
            x = task.test.gather(index)
            network = self.network.with_cached_features(task.test.gather_cached(index))
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
        self, task: Task, group: EvalGroup, routes: Tensor | None, rows: Tensor
    ) -> dict[str, Tensor]:
        outputs = self.network.outputs
        classes = group.classes if task.client_classes is not None else None
        masks = {
            "task_agnostic": outputs.seen_mask(self.last_task),
            "task_aware": outputs.task_mask(task.index, self.last_task, classes),
        }
        if routes is not None:
            masks["routed"] = routed_mask(outputs, self.last_task, routes[rows])
        return masks

    def _sums(self, active: Tensor, labels: Tensor, weight: float, task: int, mode: str) -> Tensors:
        outputs, last_task = self.network.outputs, self.last_task
        return count_group(
            self.needed_counts, active, labels, weight, outputs, task, last_task, mode
        )

    def _correct(self, logits: Tensor, mask: Tensor, labels: Tensor) -> float:
        predicted = predicted_labels(logits, mask, self.network.outputs, self.last_task)
        return float((predicted == labels.cpu()).sum())


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


def mean_evaluation(evaluators: list[Evaluator], task: Task) -> Evaluation:
    """Return the accuracy on a task, averaged over models that all see the same test data."""
    counts = [evaluator.counts(task) for evaluator in evaluators]
    pairs = zip(evaluators, counts, strict=True)
    own = {evaluator.client: each for evaluator, each in pairs if evaluator.client is not None}
    return evaluation_of(evaluators[0], counts, own)


def evaluation_of(
    evaluator: Evaluator, counts: list[EvaluationCounts], clients: Mapping[int, EvaluationCounts]
) -> Evaluation:
    """Return the evaluation over the sum of counts, with the metrics of an evaluator.

    Args:
        evaluator: Has the metrics and the outputs.
        counts: At least one.
        clients: Those among them that are of one client's test data or model.
    """
    total = reduce(add, counts)
    if not evaluator.metrics:
        return total.evaluation()
    scores = TaskScores(evaluator.metrics, evaluator.network.outputs, total.task)
    return replace(
        total.evaluation(),
        scores=scores.of_all(total.sums, [each.sums for each in clients.values()]),
        client_scores={c: scores.of_all(each.sums, []) for c, each in clients.items()},
    )
