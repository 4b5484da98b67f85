"""Sums over test examples from which metrics are computed.

Sums can be added over groups of rows, clients and nodes, and no example can be read from them.

confusion:   double [K, K + 1], examples of class i that were predicted as class j; the last column
             holds predictions of a class that the task does not have.
histograms:  double [2, K, 1000], examples of the other classes (0) and of class k (1) by the log
             odds of class k, in bins that are narrow near chance.
calibration: double [15, 3] by the probability of the predicted class, in bins of equal width:
             examples, correct ones, sum of the probabilities.
correct:     double [2]: correctly predicted examples, and all.
errors:      double [5], if numbers y are predicted: examples, sum of |error|, of error^2, of y - m
             and of (y - m)^2, in the unit of the data, with m the mean of the training data.

K is the number of classes of the task. The probability of a class is the softmax of the active
outputs, summed over the outputs of the class. For numbers there are the errors alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.core.trees import Tensors

HISTOGRAM_BINS = 1000
CALIBRATION_BINS = 15
_LARGEST_ERROR = 1e100
"""Larger sums of errors, whose squares could overflow, are no data's."""
_LARGEST_ODDS = 1000.0
"""Log odds beyond this share the outermost bins."""


@dataclass(frozen=True)
class ScoredRows:
    """Test examples of one task, and what a model says about them."""

    classes: int
    """Number of classes of the task, K."""
    labels: Tensor
    """int64 [rows]: position of the label among the task's classes."""
    predicted: Tensor
    """int64 [rows]: position of the predicted class; K for a class that the task does not have."""
    confidence: Tensor
    """double [rows]: probability of the predicted class."""
    log_odds: Tensor
    """double [rows, K]: log odds of each class; 0 is chance."""


@dataclass(frozen=True)
class ScoreCounts:
    """The counts of one task that a metric needs."""

    classes: tuple[int, ...]
    """Labels of the task; one if numbers are predicted."""
    is_binary: bool
    """Whether the stream has two classes in total; the second one is then the positive one."""
    sums: Tensors
    """The counts by name, as the module describes them; those that the metric needs."""
    clients: tuple[ScoreCounts, ...] = ()
    """The counts of each client with local test data or a personal model."""

    @property
    def confusion(self) -> Tensor:
        """Double [K, K + 1]: examples by class (rows) and predicted class (columns)."""
        return self.sums["confusion"]

    @property
    def histograms(self) -> Tensor:
        """Double [2, K, 1000]: examples without (0) and with (1) each class, by its log odds."""
        return self.sums["histograms"]

    @property
    def calibration(self) -> Tensor:
        """Double [15, 3]: examples, correct ones and sum of confidences, by confidence."""
        return self.sums["calibration"]

    @property
    def errors(self) -> Tensor:
        """Double [5]: examples, sum of |error|, of error^2, of y - m and of (y - m)^2."""
        return self.sums["errors"]

    @property
    def accuracy(self) -> float | None:
        """The accuracy, from `correct`; or R2 if numbers are predicted."""
        if "errors" in self.sums:
            return r2_of(self.errors)
        correct, total = self.sums["correct"].tolist()
        return correct / total if total else None


def score_rows(
    logits: Tensor, labels: Tensor, output_labels: Tensor, classes: tuple[int, ...], rivals: int
) -> ScoredRows:
    """Return what a model says about test examples.

    Args:
        logits: float [rows, outputs]; -inf for outputs that are not active.
        labels: int64 [rows]: labels, all of the task.
        output_labels: int64 [outputs]: label of each output.
        classes: Labels of the task.
        rivals: Number of classes among which is predicted, in general; more than 1 moves the zero
            of the log odds from one half to chance.

    """
    size = 1 + max(int(output_labels.max()), *classes)
    position = torch.full((size,), len(classes))
    position[torch.tensor(classes)] = torch.arange(len(classes))
    predicted = output_labels[logits.argmax(1)]
    by_class = _class_logits(logits.double(), output_labels, size)
    log_odds = _log_odds(by_class)
    confidence = log_odds.gather(1, predicted[:, None])[:, 0].sigmoid()
    chance = math.log(max(1, rivals - 1))
    return ScoredRows(
        len(classes), position[labels], position[predicted], confidence,
        log_odds[:, torch.tensor(classes)] + chance,
    )  # fmt: skip


def _class_logits(logits: Tensor, output_labels: Tensor, size: int) -> Tensor:
    """Return the logits of classes, double [rows, size]; a class may have several outputs."""
    result = torch.full((len(logits), size), -math.inf, dtype=torch.float64)
    for output, label in enumerate(output_labels.tolist()):
        result[:, label] = torch.logaddexp(result[:, label], logits[:, output])
    return result


def _log_odds(logits: Tensor) -> Tensor:
    """Return log p - log(1 - p) of every class, exact for probabilities near 0 and 1."""
    log_p = logits.log_softmax(1)
    best = logits.argmax(1, keepdim=True)
    others = logits.scatter(1, best, -math.inf).logsumexp(1, keepdim=True)
    log_rest = torch.log1p(-log_p.exp())
    log_rest = log_rest.scatter(1, best, others - logits.logsumexp(1, keepdim=True))
    return torch.nan_to_num(log_p - log_rest, nan=0.0, posinf=math.inf, neginf=-math.inf)


def _confusion(rows: ScoredRows) -> Tensor:
    shape = _shapes(rows.classes)["confusion"]
    return _count(rows.labels * shape[1] + rows.predicted, shape)


def _histograms(rows: ScoredRows) -> Tensor:
    shape = _shapes(rows.classes)["histograms"]
    limit = math.asinh(_LARGEST_ODDS)
    odds = rows.log_odds.clamp(-_LARGEST_ODDS, _LARGEST_ODDS).asinh()
    bins = ((odds / limit + 1) / 2 * HISTOGRAM_BINS).long().clamp(0, HISTOGRAM_BINS - 1)
    is_class = torch.nn.functional.one_hot(rows.labels, rows.classes)
    cells = is_class * rows.classes + torch.arange(rows.classes)
    return _count(cells * HISTOGRAM_BINS + bins, shape)


def _calibration(rows: ScoredRows) -> Tensor:
    bins = (rows.confidence * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    correct = (rows.predicted == rows.labels).double()
    values = torch.stack([torch.ones_like(correct), correct, rows.confidence], 1)
    return torch.zeros(CALIBRATION_BINS, 3, dtype=torch.float64).index_add(0, bins, values)


def _correct(rows: ScoredRows) -> Tensor:
    correct = (rows.predicted == rows.labels).double()
    return torch.stack([correct.sum(), torch.ones_like(correct).sum()])


def count_numbers(predicted: Tensor, labels: Tensor, weight: float, unit: float) -> Tensors:
    """Return the weighted errors of predicted numbers.

    Args:
        predicted: float [rows]: standardized predictions.
        labels: float [rows]: standardized targets.
        weight: Weight of every row.
        unit: Standard deviation by which the numbers were divided.

    """
    y = labels.double() * unit
    error = predicted.double() * unit - y
    parts = (torch.ones_like(y), error.abs(), error.square(), y, y.square())
    return {"errors": weight * torch.stack(parts).sum(1)}


def r2_of(errors: Tensor) -> float:
    """Return 1 - (sum of squared errors) / (sum of squared deviations from the mean).

    If all targets are the same it is 1 for predictions without an error, else 0.
    """
    count, _, squares, total, total_squares = errors.tolist()
    deviations = total_squares - total**2 / count
    if deviations <= 1e-12 * total_squares:
        return float(squares == 0)
    return float(1 - squares / deviations)


def _count(cells: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.bincount(cells.flatten(), minlength=math.prod(shape)).double().reshape(shape)


_COUNTS: dict[str, Callable[[ScoredRows], Tensor]] = {
    "confusion": _confusion,
    "histograms": _histograms,
    "calibration": _calibration,
    "correct": _correct,
}
CLASS_COUNTS = tuple(_COUNTS)
"""What a metric of classes can need."""
NUMBER_COUNTS = ("errors", "correct")
"""What a metric of numbers can need, `correct` in the place of which the errors are given."""
COUNT_NAMES = (*CLASS_COUNTS, "errors")
"""What a metric can need."""


def count_rows(rows: ScoredRows, names: Iterable[str]) -> Tensors:
    """Return counts of examples by name."""
    return {name: _COUNTS[name](rows) for name in names}


def _shapes(classes: int) -> dict[str, tuple[int, ...]]:
    return {
        "confusion": (classes, classes + 1),
        "histograms": (2, classes, HISTOGRAM_BINS),
        "calibration": (CALIBRATION_BINS, 3),
        "correct": (2,),
        "errors": (5,),
    }


def is_possible(name: str, value: object, classes: int, total: float) -> bool:
    """Return whether a value can be the count of a name over examples of this total weight."""
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        return False
    if tuple(value.shape) != _shapes(classes)[name]:
        return False
    margin = total * (1 + 1e-9)
    if name == "errors":
        return _are_possible_errors(value, margin)
    sums = value.sum((0, 2)) if name == "histograms" else value.sum(0).sum()[None]
    most = {"calibration": 3, "correct": 2}.get(name, 1) * margin
    return bool((value >= 0).all() and (value <= margin).all() and (sums <= most).all())


def _are_possible_errors(errors: Tensor, total: float) -> bool:
    """Return whether sums can be those of numbers: (sum a)^2 <= n sum a^2 for errors and y."""
    if not bool((errors.abs() <= _LARGEST_ERROR).all()):  # false for NaN
        return False
    count, absolute, squares, shifts, shift_squares = errors.tolist()
    limits = (count * squares * (1 + 1e-9), count * shift_squares * (1 + 1e-9))
    is_count = 0 < count <= total and absolute >= 0
    return bool(is_count and absolute**2 <= limits[0] and shifts**2 <= limits[1])
