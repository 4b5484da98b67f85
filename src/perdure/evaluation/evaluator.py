"""Accuracy and other metrics on every task so far, in three inference modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from perdure.contract.context import Server
from perdure.contract.method import Method, best_tasks
from perdure.core.trees import Tensors
from perdure.data.streams.stream import EvalGroup, Task
from perdure.evaluation.counts import count_numbers, r2_of
from perdure.evaluation.metrics import Metric, MetricValues, TaskScores, add_sums, count_group
from perdure.models.network import Network, Outputs

# ---- The outcome of an evaluation on one task: as sums that can be added, and as fractions of them

MODES = ("task_agnostic", "task_aware", "routed")
"""Inference modes, as result.json names them."""


@dataclass(frozen=True)
class Evaluation:
    """Accuracy on one task."""

    accuracy: dict[str, float | None]
    """Fraction of correct predictions by mode; of numbers R2. `routed` is None if the method cannot
    route."""
    routing: float | None
    """Fraction of examples whose task was predicted correctly. None if the method cannot route."""
    predicted_tasks: list[float] | None = None
    """Fraction of examples predicted to be of each task so far; the rest is of no known task."""
    scores: MetricValues = field(default_factory=dict)
    """Value of each metric by mode."""
    client_scores: dict[int, MetricValues] = field(default_factory=dict)
    """The same of each client with local test data or a personal model."""
    client_tests: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By node of a federation that evaluated the model: `examples` and `accuracy` by mode."""


@dataclass(frozen=True)
class EvaluationCounts:
    """Weighted numbers of test examples of one task, which can be added to those of others."""

    task: int
    """Index of the task, from 0."""
    correct: dict[str, float]
    """Correctly predicted examples by mode; 0 if numbers are predicted."""
    total: float
    """All examples."""
    predicted_tasks: list[float] | None
    """Examples predicted to be of each task so far. None if the method cannot route."""
    sums: dict[str, Tensors] = field(default_factory=dict)
    """Counts that the metrics need, by mode and name; see `perdure.evaluation.counts`."""

    def __add__(self, other: EvaluationCounts) -> EvaluationCounts:
        correct = {mode: value + other.correct[mode] for mode, value in self.correct.items()}
        predicted_tasks = None
        if self.predicted_tasks is not None and other.predicted_tasks is not None:
            predicted_tasks = [
                a + b for a, b in zip(self.predicted_tasks, other.predicted_tasks, strict=True)
            ]
        sums = {
            mode: add_sums(self.sums.get(mode, {}), other.sums.get(mode, {}))
            for mode in self.sums | other.sums
        }
        total = self.total + other.total
        return EvaluationCounts(self.task, correct, total, predicted_tasks, sums)

    def scaled(self, factor: float) -> EvaluationCounts:
        """Return the counts as those of a fraction of the examples."""
        predicted_tasks = self.predicted_tasks and [factor * v for v in self.predicted_tasks]
        sums = {m: {n: factor * v for n, v in by.items()} for m, by in self.sums.items()}
        correct = {mode: factor * value for mode, value in self.correct.items()}
        return EvaluationCounts(self.task, correct, factor * self.total, predicted_tasks, sums)

    def evaluation(self) -> Evaluation:
        """Return the counts as fractions of all examples."""
        accuracy = {mode: self._accuracy(mode) for mode in self.correct}
        if self.predicted_tasks is None:
            return Evaluation({**accuracy, "routed": None}, None)
        fractions = [value / self.total for value in self.predicted_tasks]
        return Evaluation(accuracy, fractions[self.task], fractions)

    def _accuracy(self, mode: str) -> float | None:
        errors = self.sums.get(mode, {}).get("errors")
        return self.correct[mode] / self.total if errors is None else r2_of(errors)


# ---- The predictions of a model on one task's test data, and their counts


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
        labels = self.task.test.y[group.index].cpu()
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


# ---- Accuracy and other metrics on every task so far, in three inference modes
#
# task_agnostic: the prediction is the best of all outputs of the tasks seen so far.
# task_aware:    the best of the outputs of the example's task, which is given.
# routed:        the best of the outputs of the task that the method predicts for the example; of
#                all tasks so far if it predicts that the example is of no known task (-1).

__all__ = ["MODES", "Evaluation", "EvaluationCounts", "Evaluator", "evaluation_of"]
BATCH_ROWS = 1024


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
    metric_counts: tuple[str, ...] = ()
    """Names of the counts that the metrics need."""

    @property
    def needed_counts(self) -> tuple[str, ...]:
        """Names of the counts that are made; of numbers always the errors, which R2 needs."""
        return ("errors",) if self.network.outputs.is_number else self.metric_counts

    def evaluate(self, task: Task) -> Evaluation:
        """Return the accuracy on a task's test groups, weighted by the stream's group weights."""
        return self.counts(task).evaluation()

    def counts(self, task: Task) -> EvaluationCounts:
        """Return evaluation counts, which can be added to those of other clients."""
        return self.predictions(task).counts()

    def predictions(self, task: Task) -> TaskPredictions:
        """Return what the model predicts for the test rows of a task."""
        rows = torch.unique(torch.cat([group.index for group in task.groups]))
        logits, routes = self._outputs(task, rows)
        position = torch.zeros(len(task.test.y), dtype=torch.int64)
        position[rows] = torch.arange(len(rows))
        outputs = self.network.outputs
        return TaskPredictions(
            task, outputs, self.last_task, self.needed_counts, position, logits, routes
        )

    def _outputs(self, task: Task, rows: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the logits by mode, and the predicted task of each row."""
        logits, aware, routes = [], [], []
        for batch_rows in torch.split(rows, BATCH_ROWS):
            index = batch_rows.to(task.test.device)
            x = task.test.gather(index)
            network = self.network.with_cached_features(task.test.gather_cached(index))
            logits.append(self._predict(x, network))
            if self.method.needs.task_aware:
                aware.append(self._predict(x, network, task.index))
            route = self.method.route(self.server, x, network, self.client_state)
            if route is not None:
                routes.append(best_tasks(route).cpu())
        agnostic = torch.cat(logits)
        by_mode = dict.fromkeys(MODES, agnostic)
        if aware:
            by_mode["task_aware"] = torch.cat(aware)
        return by_mode, torch.cat(routes) if routes else None

    def _predict(self, x: Tensor, network: Network, task: int | None = None) -> Tensor:
        return self.method.predict(self.server, x, network, self.client_state, task).cpu()


def mean_evaluation(evaluators: list[Evaluator], task: Task) -> Evaluation:
    """Return the accuracy on a task, averaged over models that all see the same test data.

    The scores of a client are those of its model, on its test rows if the data names them.
    """
    predictions = [evaluator.predictions(task) for evaluator in evaluators]
    counts = [predicted.counts() for predicted in predictions]
    if not evaluators[0].metrics:
        return evaluation_of(evaluators[0], counts, {})
    by_client: dict[int, EvaluationCounts] = {}
    for evaluator, predicted, over_all in zip(evaluators, predictions, counts, strict=True):
        if task.test_clients is not None:
            by_client |= _counts_by_client(predicted, evaluator.client)
        elif evaluator.client is not None:
            by_client[evaluator.client] = over_all
    return evaluation_of(evaluators[0], counts, by_client)


def _counts_by_client(
    predicted: TaskPredictions, client: int | None
) -> dict[int, EvaluationCounts]:
    """Return the counts of each client with test rows; of one client if it is given."""
    assert predicted.task.test_clients is not None
    present = torch.unique(predicted.task.test_clients).tolist() if client is None else [client]
    counts = {number: predicted.counts(number) for number in present}
    return {number: each for number, each in counts.items() if each.total}


def evaluation_of(
    evaluator: Evaluator, counts: list[EvaluationCounts], clients: Mapping[int, EvaluationCounts]
) -> Evaluation:
    """Return the evaluation over the sum of counts, with the metrics of an evaluator."""
    total = reduce(add, counts)
    if not evaluator.metrics:
        return total.evaluation()
    scores = TaskScores(evaluator.metrics, evaluator.network.outputs, total.task)
    return replace(
        total.evaluation(),
        scores=scores.of_all(total.sums, [each.sums for each in clients.values()]),
        client_scores={c: scores.of_all(each.sums, []) for c, each in clients.items()},
    )
