"""A multi-layer perceptron of any depth."""

from __future__ import annotations

import math
from itertools import pairwise

from pydantic import Field
from torch import nn

from perdure.config.section import PositiveInt, Probabilities
from perdure.models.modules.plain import NO_NORM, Norm, PlainModel, dropout_rates, sequence


class MlpModel(PlainModel):
    """A multilayer perceptron.

    Example: `model: {kind: mlp, hidden: [100, 100]}`
    """

    hidden: list[PositiveInt] = Field(default=[100, 100])
    """Sizes of the hidden layers."""
    dropout: Probabilities = 0.0
    """Dropout rate of the hidden layers, or one rate for the input and each hidden layer."""

    def make_module(self, shape: tuple[int, ...]) -> nn.Module:
        """Return the module, whose output is the head's input."""
        hidden = tuple(self.hidden)
        rates = dropout_rates(self.kind, self.dropout, len(hidden) + 1)
        if not isinstance(self.dropout, list):  # inputs are dropped only if a list says so
            rates = (0.0, *rates[1:])
        return mlp(math.prod(shape), hidden, rates, self.norm_layers(), self.bias)


def mlp(
    inputs: int,
    hidden: tuple[int, ...],
    dropout: tuple[float, ...],
    norm: Norm = NO_NORM,
    bias: bool = True,
) -> nn.Sequential:
    """Return fully connected layers with ReLU, fc1, fc2, ..., for rows of any shape."""
    start: dict[str, nn.Module] = {"flatten": nn.Flatten(), "drop0": nn.Dropout(dropout[0])}
    return sequence(start | hidden_layers((inputs, *hidden), dropout[1:], norm, bias))


def hidden_layers(
    sizes: tuple[int, ...], dropout: tuple[float, ...], norm: Norm, bias: bool, before: int = 0
) -> dict[str, nn.Module]:
    """Return the parts of hidden layers by name: fc1 with norm, ReLU and dropout, fc2, ..."""
    parts: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
        parts |= {
            f"fc{i}": nn.Linear(inputs, outputs, bias),
            f"bn{before + i}": norm.for_rows(outputs),
            f"relu{before + i}": nn.ReLU(),
            f"drop{before + i}": nn.Dropout(dropout[i - 1]),
        }
    return parts
