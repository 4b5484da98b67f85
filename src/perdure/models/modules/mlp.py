"""A multi-layer perceptron of any depth."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from perdure.models.modules.norms import NO_NORM, Norm
from perdure.models.modules.sequence import sequence


def mlp(
    inputs: int,
    hidden: tuple[int, ...],
    dropout: tuple[float, ...],
    norm: Norm = NO_NORM,
    bias: bool = True,
) -> nn.Sequential:
    """Return fully connected layers with ReLU, fc1, fc2, ..., for rows of any shape.

    Args:
        inputs: Values per row.
        hidden: Size of each hidden layer.
        dropout: Rate for the input, then for each hidden layer's output.
        norm: Norm between a hidden layer and its ReLU.
        bias: Whether the hidden layers have biases.
    """
    parts: dict[str, nn.Module] = {"flatten": nn.Flatten(), "drop0": nn.Dropout(dropout[0])}
    for i, (before, after) in enumerate(pairwise((inputs, *hidden)), start=1):
        parts |= {
            f"fc{i}": nn.Linear(before, after, bias),
            f"bn{i}": norm.for_rows(after),
            f"relu{i}": nn.ReLU(),
            f"drop{i}": nn.Dropout(dropout[i]),
        }
    return sequence(parts)
