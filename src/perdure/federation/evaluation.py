"""Accuracy on every task so far, in three modes of inference.

task_agnostic: the prediction is the best of all outputs of the tasks seen so far.
task_aware:    the best of the outputs of the example's own task, which is told.
routed:        the best of the outputs of the task that the method predicts for the example.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.data.streams import EvalGroup, Task
from perdure.methods.base import Method, Server
from perdure.models.network import Network

MODES = ("task_agnostic", "task_aware", "routed")
_ROWS = 1024


@dataclass(frozen=True)
class Scores:
    """Accuracy on one task, by mode; None where the method cannot route."""

    accuracy: dict[str, float | None]
    routing: float | None
    """Share of the examples whose task was told rightly."""


@dataclass(frozen=True)
class Judge:
    """A trained model under test after a task."""

    method: Method
    server: Server
    network: Network
    newest: int

    def score(self, task: Task) -> Scores:
        """Accuracy on a task's test groups, weighted as the stream says."""
        rows = torch.unique(torch.cat([group.index for group in task.groups]))
        logits, routes = self._answers(task, rows)
        place = torch.zeros(len(task.test_labels), dtype=torch.int64)
        place[rows] = torch.arange(len(rows))
        totals = dict.fromkeys(MODES, 0.0)
        count = told = 0.0
        for group in task.groups:
            at, labels = place[group.index], task.test_labels[group.index]
            for mode, mask in self._masks(task, group, routes, at).items():
                right = self._right(logits[at], mask, labels)
                totals[mode] += group.weight * right
            if routes is not None:
                told += group.weight * float((routes[at] == task.index).sum())
            count += group.weight * len(group.index)
        found = {mode: total / count for mode, total in totals.items()}
        if routes is None:
            return Scores({**found, "routed": None}, None)
        return Scores({**found}, told / count)

    def _answers(self, task: Task, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        logits, routes = [], []
        for part in torch.split(rows, _ROWS):
            x = task.test.gather(part.to(task.test.rows.device))
            logits.append(self.method.predict(self.server, x, self.network).cpu())
            route = self.method.route(self.server, x, self.network)
            if route is not None:
                routes.append(route.cpu())
        return torch.cat(logits), torch.cat(routes) if routes else None

    def _masks(
        self, task: Task, group: EvalGroup, routes: Tensor | None, at: Tensor
    ) -> dict[str, Tensor]:
        outputs = self.network.outputs
        own = group.classes if task.choice is not None else None
        masks = {
            "task_agnostic": outputs.seen(self.newest),
            "task_aware": outputs.allowed(task.index, self.newest, own),
        }
        if routes is not None:
            each = [outputs.allowed(j, self.newest) for j in range(self.newest + 1)]
            masks["routed"] = torch.stack(each)[routes[at]]
        return masks

    def _right(self, logits: Tensor, mask: Tensor, labels: Tensor) -> float:
        best = logits.masked_fill(~mask, float("-inf")).argmax(1)
        return float((self.network.outputs.answers(self.newest)[best] == labels.cpu()).sum())
