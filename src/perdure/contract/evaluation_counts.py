"""The outcome of an evaluation on one task: as sums that can be added, and as fractions of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from perdure.contract.score_counts import r2_of
from perdure.contract.scores import MetricValues, add_sums
from perdure.core.trees import Tensors

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
    """Counts that the metrics need, by mode and name; see `perdure.contract.score_counts`."""

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
