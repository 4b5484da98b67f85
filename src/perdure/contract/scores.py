"""Metrics of one task's predictions, by mode and by client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts, count_rows, score_rows
from perdure.core.trees import Tensors
from perdure.models.outputs import Outputs

ModeSums = Mapping[str, Tensors]
"""Counts by mode and name."""
MetricValues = dict[str, dict[str, float | None]]
"""Values by metric and mode."""


def needed_counts(metrics: Mapping[str, Metric]) -> tuple[str, ...]:
    """Return the names of the counts that metrics need."""
    return tuple(dict.fromkeys(name for metric in metrics.values() for name in metric.needs))


def add_sums(sums: Tensors, others: Tensors) -> Tensors:
    """Return the counts of two sets of examples together; either may be empty."""
    if not sums or not others:
        return sums or others
    return {name: value + others[name] for name, value in sums.items()}


def count_group(
    names: Iterable[str], active: Tensor, labels: Tensor, weight: float, outputs: Outputs,
    task: int, last_task: int, mode: str,
) -> Tensors:  # fmt: skip
    """Return the weighted counts of a group of test rows.

    Args:
        names: Names of the counts.
        active: float [rows, outputs]: logits; -inf for outputs that are not active.
        labels: int64 [rows].
        weight: Weight of the group.
        outputs: The outputs of the network.
        task: The task of the rows.
        last_task: The newest task.
        mode: The inference mode.
    """
    classes, output_labels = outputs.task_classes[task], outputs.output_labels(last_task)
    seen = set(output_labels[outputs.seen_mask(last_task)].tolist())
    rivals = len(classes) if mode == "task_aware" else len(seen)
    rows = score_rows(active, labels, output_labels, classes, rivals)
    return {name: weight * value for name, value in count_rows(rows, names).items()}


@dataclass(frozen=True)
class TaskScores:
    """Computes the metrics of one task from counts."""

    metrics: Mapping[str, Metric]
    outputs: Outputs
    task: int

    def of_all(self, sums: ModeSums, clients: Iterable[ModeSums]) -> MetricValues:
        """Return the scores over all examples, some of which may be counted by client, too."""
        parts = list(clients)
        return {
            name: {
                mode: metric.value(self._counts(sums, mode, parts)) if mode in sums else None
                for mode in ("task_agnostic", "task_aware", "routed")
            }
            for name, metric in self.metrics.items()
        }

    def _counts(self, sums: ModeSums, mode: str, clients: list[ModeSums]) -> ScoreCounts:
        parts = tuple(self._counts(client, mode, []) for client in clients if mode in client)
        classes = self.outputs.task_classes[self.task]
        return ScoreCounts(classes, self.outputs.classes == 2, sums[mode], parts)
