"""One score per class for rows of inputs: what a trained model predicts by.

The prediction is routed if the method can route, else task-agnostic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.contract.context import Server
from perdure.contract.evaluation import routed_mask
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


def score_rows(
    method: Method, server: Server, network: Network, last_task: int, x: Tensor
) -> RowScores:
    """Return the scores of normalized rows.

    Args:
        method: The method, which predicts and may route.
        server: The trained model.
        network: The network with the outputs so far.
        last_task: The last task that was trained, from 0.
        x: Rows, float [rows, ...] or int32 tokens.
    """
    tasks = method.task_scores(server, x, network)
    routes = best_tasks(tasks) if tasks is not None else method.route(server, x, network)
    logits, outputs = method.predict(server, x, network), network.outputs
    if routes is None:
        mask = outputs.seen_mask(last_task)
    else:
        mask = routed_mask(outputs, last_task, routes)
    active = logits.masked_fill(~mask, -torch.inf)
    return RowScores(best_outputs(active, outputs, last_task), routes, tasks)


def best_outputs(logits: Tensor, outputs: Outputs, last_task: int) -> Tensor:
    """Return the largest output of each class, float [rows, classes]; -inf for classes without.

    Args:
        logits: float [rows, outputs].
        outputs: The outputs of the network.
        last_task: The newest task, from 0.
    """
    padded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)
    return padded[:, _outputs_by_class(outputs, last_task)].amax(2)


def _outputs_by_class(outputs: Outputs, last_task: int) -> Tensor:
    """Return the outputs of each class, int64 [classes, most outputs of a class].

    Classes with fewer outputs are filled up with the number of outputs.
    """
    labels = outputs.output_labels(last_task)
    found = [torch.nonzero(labels == label)[:, 0] for label in range(outputs.classes)]
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True, padding_value=len(labels))
