"""Metrics of predictions by name, and their values by mode and by client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from perdure.core.errors import bad_value
from perdure.core.registry import Registry
from perdure.core.trees import Tensors
from perdure.evaluation.counts import (
    CLASS_COUNTS,
    COUNT_NAMES,
    NUMBER_COUNTS,
    ScoreCounts,
    count_rows,
    r2_of,
    score_rows,
)
from perdure.models.network import Outputs

# ---- The base class of a metric of predictions


class Metric:
    """A number for the predictions on one task's test data, computed from counts.

    A subclass says which counts it needs. Its docstring's first line is shown as its definition.
    """

    needs: ClassVar[tuple[str, ...]] = ("confusion",)
    """Counts that it is computed from: `confusion`, `histograms`, `calibration` (classes), `errors`
    (numbers) or `correct` (both)."""
    lower_is_better: ClassVar[bool] = False
    """Whether it is an error, so that forgetting raises it."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the metric, or None if it is not defined for these counts.

        Args:
            counts: Sums over the test examples of one task.

        """
        raise NotImplementedError


# ---- Metrics of predictions by name; one file each

METRICS: Registry[Metric] = Registry(
    key="evaluate.metrics",
    base=Metric,
    base_name="perdure.Metric",
    group="perdure.metrics",
    builtin={
        "accuracy": "perdure.evaluation.metrics.Accuracy",
        "macro_f1": "perdure.evaluation.metrics.MacroF1",
        "auroc": "perdure.evaluation.metrics.Auroc",
        "sensitivity": "perdure.evaluation.metrics.Sensitivity",
        "specificity": "perdure.evaluation.metrics.Specificity",
        "ece": "perdure.evaluation.metrics.Ece",
        "worst_client": "perdure.evaluation.metrics.WorstClient",
        "r2": "perdure.evaluation.metrics.R2",
        "mae": "perdure.evaluation.metrics.Mae",
    },
)
Target = Literal["class", "number"]
"""What is predicted: `data.target`."""
_DEFAULTS: dict[Target, tuple[str, ...]] = {"class": ("accuracy",), "number": ("r2", "mae")}
_COUNTS_OF: dict[Target, tuple[str, ...]] = {"class": CLASS_COUNTS, "number": NUMBER_COUNTS}
MAIN: dict[Target, str] = {"class": "accuracy", "number": "r2"}
"""The metric whose matrix every run has (`matrix` in result.json)."""


def make_metrics(
    names: Sequence[str] | None, target: Target = "class", by_client: bool = False,
    folder: Path | None = None,
) -> dict[str, Metric]:  # fmt: skip
    """Return the metrics that a config names; none for accuracy alone, which every run has.

    Raises:
        UserError: There is no such metric, or it needs a count that does not exist.

    """
    chosen = list(names or _DEFAULTS[target])
    if chosen == ["accuracy"] and target == "class" and not by_client:
        return {}
    return {name: _make(name, target, folder) for name in chosen}


def _make(name: str, target: Target, folder: Path | None) -> Metric:
    metric = METRICS.find(name, folder)()
    unknown = [need for need in metric.needs if need not in COUNT_NAMES]
    if unknown:
        raise bad_value(f"{name}.needs", unknown[0], ", ".join(COUNT_NAMES))
    if not _suits(metric, target):
        suitable = ", ".join(n for n in METRICS.builtin if _suits(METRICS.find(n), target))
        raise bad_value("evaluate.metrics", name, f"{suitable} with data.target {target!r}")
    return metric


def _suits(metric: Metric | type[Metric], target: Target) -> bool:
    return set(metric.needs) <= set(_COUNTS_OF[target])


def meaning(name: str) -> str:
    """Return the definition of a built-in metric; of others only that they are a user's."""
    return definition(METRICS.find(name)) if METRICS.is_builtin(name) else f"the metric {name}"


def definition(metric: Metric | type[Metric]) -> str:
    """Return the first line of a metric's docstring, as part of a sentence."""
    first = (metric.__doc__ or "").partition("\n")[0].rstrip(".")
    return first if first[1:2].isupper() or first[1:2].isdigit() else first[:1].lower() + first[1:]


# ---- Accuracy


class Accuracy(Metric):
    """Fraction of correct predictions."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the accuracy."""
        total = float(counts.confusion.sum())
        return float(counts.confusion.diagonal().sum()) / total if total else None


# ---- The area under the ROC curve


class Auroc(Metric):
    """Area under the ROC curve of each class against the others, the mean over classes."""

    needs = ("histograms",)

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the mean over classes of P(score of an example of the class > of another).

        Examples in one bin count as ties, which are one half.
        """
        others, own = counts.histograms
        below = others.cumsum(1) - others
        pairs = own.sum(1) * others.sum(1)
        areas = (own * (below + others / 2)).sum(1)[pairs > 0] / pairs[pairs > 0]
        return float(areas.mean()) if len(areas) else None


# ---- The expected calibration error


class Ece(Metric):
    """Expected calibration error, the mean gap of confidence and accuracy in 15 bins."""

    needs = ("calibration",)
    lower_is_better = True

    def value(self, counts: ScoreCounts) -> float | None:
        """Return sum_b n_b / n |accuracy_b - confidence_b|."""
        examples, correct, confidence = counts.calibration.unbind(1)
        total = float(examples.sum())
        return float((correct - confidence).abs().sum()) / total if total else None


# ---- The F1 score, averaged over classes


class MacroF1(Metric):
    """F1 score, the mean over the classes that the task's test data has."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the mean of 2 TP / (examples of the class + predictions of the class)."""
        correct = counts.confusion.diagonal()
        examples, predicted = counts.confusion.sum(1), counts.confusion.sum(0)[:-1]
        scores = 2 * correct / (examples + predicted)
        scores = scores[examples > 0]
        return float(scores.mean()) if len(scores) else None


# ---- The mean absolute error


class Mae(Metric):
    """Mean absolute error of predicted numbers, in the unit of the data."""

    needs = ("errors",)
    lower_is_better = True

    def value(self, counts: ScoreCounts) -> float | None:
        """Return sum |error| / n."""
        examples, absolute = counts.errors[:2].tolist()
        return absolute / examples if examples else None


# ---- R2, the coefficient of determination


class R2(Metric):
    """R2 of predicted numbers: 1 is perfect, 0 as good as always the mean, and less is worse."""

    needs = ("errors",)

    def value(self, counts: ScoreCounts) -> float | None:
        """Return 1 - (sum of squared errors) / (sum of squared deviations from the mean)."""
        return r2_of(counts.errors) if float(counts.errors[0]) else None


# ---- Sensitivity, which is recall


class Sensitivity(Metric):
    """Recall: of the second class if there are two in total, else the mean over classes."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return TP / (TP + FN)."""
        examples = counts.confusion.sum(1)
        recall = counts.confusion.diagonal() / examples
        chosen = examples > 0
        if counts.is_binary:
            chosen = chosen & (torch.tensor(counts.classes) == 1)
        return float(recall[chosen].mean()) if chosen.any() else None


# ---- Specificity: how many of the others are not taken for a class


class Specificity(Metric):
    """Recall of the others: for the second class if there are two in total, else the class mean."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return TN / (TN + FP)."""
        confusion = counts.confusion
        examples = confusion.sum(1)
        others = examples.sum() - examples
        false_alarms = confusion.sum(0)[:-1] - confusion.diagonal()
        chosen = (others > 0) & (examples > 0)
        if counts.is_binary:
            chosen = (others > 0) & (torch.tensor(counts.classes) == 1)
        return float((1 - false_alarms / others)[chosen].mean()) if chosen.any() else None


# ---- The accuracy of the worst client


class WorstClient(Metric):
    """Lowest accuracy (R2 of numbers) of a client with local test data or its own model."""

    needs = ("correct",)

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the lowest accuracy, or None if there are no such clients."""
        values = [client.accuracy for client in counts.clients]
        return min((value for value in values if value is not None), default=None)


# ---- Metrics of one task's predictions, by mode and by client

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
