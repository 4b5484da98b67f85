"""Predictions with what a model knows about them: class, probability, task and margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from perdure.contract.task_scores import NO_TASK, task_margins
from perdure.runs.class_scores import RowScores


@dataclass(frozen=True)
class Prediction:
    """The prediction of one row."""

    label: int
    """The predicted class, from 0."""
    class_name: str
    """Name of the class."""
    probability: float
    """Probability of the class among those that were considered, by softmax."""
    task: int | None
    """The predicted task, from 0. None if the method cannot route, or for no known task."""
    margin: float | None
    """Score of the predicted task minus that of the second best, in the router's terms: votes,
    cosines or log-densities. None if the method has no scores, or the row fits fewer than two
    tasks."""
    known: bool
    """False for a row that fits no task so far."""


def class_probabilities(scores: Tensor) -> Tensor:
    """Return the softmax of class scores, double [rows, classes]; 0 where the score is -inf."""
    return scores.double().softmax(1)


def describe_rows(scored: RowScores, class_names: Sequence[str]) -> list[Prediction]:
    """Return the prediction of each row."""
    labels = scored.classes.argmax(1)
    probabilities = class_probabilities(scored.classes).gather(1, labels.unsqueeze(1))[:, 0]
    nothing = [None] * len(labels)
    routes = nothing if scored.routes is None else scored.routes.tolist()
    margins = nothing if scored.tasks is None else task_margins(scored.tasks).tolist()
    rows = zip(labels.tolist(), probabilities.tolist(), routes, margins, strict=True)
    return [_prediction(class_names, *row) for row in rows]


def _prediction(
    names: Sequence[str], label: int, probability: float, route: int | None, margin: float | None
) -> Prediction:
    known = route != NO_TASK
    sure = None if margin is None or math.isnan(margin) else margin
    return Prediction(label, names[label], probability, route if known else None, sure, known)
