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
from perdure.contract.evaluation_counts import MODES, Evaluation, EvaluationCounts
from perdure.contract.method import Method
from perdure.contract.metrics.metric import Metric
from perdure.contract.predictions import TaskPredictions
from perdure.contract.scores import TaskScores
from perdure.data.streams import Task
from perdure.models.network import Network

__all__ = ["MODES", "Evaluation", "EvaluationCounts", "Evaluator", "evaluation_of"]
_BATCH_ROWS = 1024


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
        position = torch.zeros(len(task.test_labels), dtype=torch.int64)
        position[rows] = torch.arange(len(rows))
        outputs = self.network.outputs
        return TaskPredictions(
            task, outputs, self.last_task, self.needed_counts, position, logits, routes
        )

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
