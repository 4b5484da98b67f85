"""Predictions of a trained model: the rows it is given, a score per class, and its margins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.contract.context import Server
from perdure.contract.method import NO_TASK, Method, best_tasks, task_margins
from perdure.core.errors import UserError
from perdure.models.network import Network, Outputs

# ---- Arrays that a trained model is given, as rows of its inputs before normalization


def model_rows(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return inputs as rows of values, channels first: [N, values].

    Args:
        x: Inputs of the shape [N, *shape]; images may have their channels last, or none.
        shape: Shape of an input of the model.
        dtype: Type of an input of the model. If it is float32, all numbers are accepted.

    Raises:
        UserError: The inputs have another shape or type.

    """
    rows = _finite(x) if dtype == torch.float32 else x
    if rows.dtype != dtype:
        raise UserError(f"input: must be {dtype_name(dtype)}, got {dtype_name(rows.dtype)}")
    return _channels_first(rows, shape).reshape(len(rows), math.prod(shape)).contiguous()


def _channels_first(rows: Tensor, expected: tuple[int, ...]) -> Tensor:
    shape = tuple(rows.shape[1:])
    if shape == expected:
        return rows
    if len(expected) == 3:
        channels, height, width = expected
        if shape == (height, width, channels):
            return rows.permute(0, 3, 1, 2)
        if (1, *shape) == expected:
            return rows
    raise UserError(f"input: must be rows of shape {expected}, got rows of shape {shape}")


def _finite(rows: Tensor) -> Tensor:
    """Return numbers as float32; UserError if one of them is not finite."""
    rows = rows.to(torch.float32)
    if not torch.isfinite(rows).all():
        raise UserError("input: must be finite numbers, got NaN, infinite or too large values")
    return rows


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type, such as float32."""
    return str(dtype).removeprefix("torch.")


# ---- One score per class for rows of inputs: what a trained model predicts by
#
# The prediction is routed if the method can route, else task-agnostic.


@dataclass(frozen=True)
class RowScores:
    """What a model knows about some rows."""

    classes: Tensor
    """Score of each class, float [rows, classes]; -inf for classes that cannot be predicted."""
    routes: Tensor | None
    """Predicted task, int64 [rows]; -1 for no known task. None if the method cannot route."""
    tasks: Tensor | None
    """Score of each task, float [rows, tasks]. None if the method has none."""


@dataclass(frozen=True)
class OutputMap:
    """Which outputs belong to which class and to which task, as tensors."""

    by_class: Tensor
    """Outputs of each class, int64 [classes, most outputs of a class]; classes with fewer are
    filled up with the number of outputs."""
    masks: Tensor
    """Outputs of each task so far and, in the last row, of all: bool [tasks + 1, outputs]."""

    @classmethod
    def of(cls, outputs: Outputs, last_task: int) -> OutputMap:
        """Return the map while `last_task` (from 0) is the newest task."""
        tasks = [outputs.task_mask(task, last_task) for task in range(last_task + 1)]
        labels = outputs.output_labels(last_task)
        found = [torch.nonzero(labels == label)[:, 0] for label in range(outputs.classes)]
        by_class = torch.nn.utils.rnn.pad_sequence(found, True, len(labels))
        return cls(by_class, torch.stack([*tasks, outputs.seen_mask(last_task)]))

    def class_scores(self, logits: Tensor, routes: Tensor | None) -> Tensor:
        """Return the largest active output of each class, float [rows, classes]; -inf for none.

        Args:
            logits: float [rows, outputs].
            routes: Predicted task of each row, whose outputs are active; those of all tasks are for
                -1, and for all rows if None.

        """
        active = logits.masked_fill(~self.masks[-1 if routes is None else routes], -torch.inf)
        padded = torch.nn.functional.pad(active, (0, 1), value=-torch.inf)
        return padded[:, self.by_class].amax(2)


def score_rows(
    method: Method, server: Server, network: Network, outputs: OutputMap, x: Tensor
) -> RowScores:
    """Return the scores of normalized rows.

    Args:
        method: The method, which predicts and may route.
        server: The trained model.
        network: The network with the outputs so far.
        outputs: Classes and tasks of the outputs.
        x: Rows, float [rows, ...] or int32 tokens.

    """
    routed = method.route(server, x, network)
    routes = None if routed is None else best_tasks(routed)
    tasks = routed if routed is not None and routed.is_floating_point() else None
    logits = method.predict(server, x, network)
    return RowScores(outputs.class_scores(logits, routes), routes, tasks)


# ---- Predictions with what a model knows about them: class, probability, task and margin


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
