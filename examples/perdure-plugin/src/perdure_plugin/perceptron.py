"""A perceptron with one hidden layer, as a model kind."""

from __future__ import annotations

from torch import Tensor, nn


class Perceptron(nn.Module):
    """One hidden layer on flat inputs.

    Args:
        hidden: Units of the hidden layer.
        num_classes: Outputs of the head; `auto` in a config.
    """

    def __init__(self, hidden: int = 16, num_classes: int = 10) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.LazyLinear(hidden), nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of a batch."""
        logits: Tensor = self.fc2(self.fc1(x.flatten(1)).relu())
        return logits
