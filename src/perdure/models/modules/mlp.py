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
    start: dict[str, nn.Module] = {"flatten": nn.Flatten(), "drop0": nn.Dropout(dropout[0])}
    return sequence(start | hidden_layers((inputs, *hidden), dropout[1:], norm, bias))


def hidden_layers(
    sizes: tuple[int, ...], dropout: tuple[float, ...], norm: Norm, bias: bool, before: int = 0
) -> dict[str, nn.Module]:
    """Return the parts of hidden layers by name: fc1 with norm, ReLU and dropout, fc2, ...

    Args:
        sizes: Size of the input, then of each hidden layer.
        dropout: Rate for each layer's output.
        norm: Norm between a layer and its ReLU.
        bias: Whether the layers have biases.
        before: Number of layers of other kinds in front of them, whose norms are counted, too.
    """
    parts: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        parts |= {
            f"fc{i}": nn.Linear(inputs, outputs, bias),
            f"bn{before + i}": norm.for_rows(outputs),
            f"relu{before + i}": nn.ReLU(),
            f"drop{before + i}": nn.Dropout(dropout[i - 1]),
        }
    return parts
