"""Targets that are numbers (`data.target: number`): their standardization, and their one class.

Where classes are counted, all examples with numbers are of one class, whose output is the number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perdure.config import DataConfig
from perdure.data.source import Array

NUMBER_CLASS = ("number",)
"""Names of the classes of examples whose targets are numbers."""


@dataclass(frozen=True)
class NumberScale:
    """Mean and standard deviation by which numbers are standardized for training."""

    mean: float
    std: float

    def standardize(self, values: Tensor) -> Tensor:
        """Return numbers in their own unit, of any shape, as targets of training, float32."""
        return ((values.double() - self.mean) / self.std).float()

    def restore(self, values: Tensor) -> Tensor:
        """Return outputs of a model in the unit of the data, double."""
        return values.double() * self.std + self.mean


def number_scale(y: Tensor, config: DataConfig) -> NumberScale | None:
    """Return the scale of training targets, or None if they are labels of classes.

    Args:
        y: Targets of the training data: int64 labels, or double [rows].
        config: The section with `target_mean` and `target_std`. If None, they are those of `y`.
    """
    if not y.is_floating_point():
        return None
    mean, std = config.target_mean, config.target_std
    mean = float(y.double().mean()) if mean is None else mean
    return NumberScale(mean, std or _deviation(y.double()))


def _deviation(y: Tensor) -> float:
    """Return the standard deviation, or 1 of numbers that are all the same."""
    return float(y.std(correction=0)) or 1.0


def class_labels(y: Tensor) -> Tensor:
    """Return labels as they are, and for numbers the label 0 of each: int64 [rows]."""
    return torch.zeros_like(y, dtype=torch.int64) if y.is_floating_point() else y


def check_numbers(y: Array, rows: int, name: str) -> Array:
    """Return targets as double [rows].

    Args:
        y: Numbers, or strings of numbers, [rows] or [rows, 1].
        rows: Number of examples.
        name: Name of the array in error messages.

    Raises:
        ValueError: `y` has another shape, or values that are no numbers or not finite.
    """
    if y.shape != (rows,) and y.shape != (rows, 1):
        raise ValueError(f"{name} has shape {y.shape} for {rows} rows, not one number per row")
    try:
        numbers = y.reshape(rows).astype(np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name} contains values that are not numbers") from None
    if not np.isfinite(numbers).all():
        row = int(np.argmin(np.isfinite(numbers)))
        raise ValueError(f"{name} contains a value in row {row} that is NaN or infinite")
    return numbers
