"""Secret draws of clients on real nodes, which no one who knows the run's seed can repeat."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perdure.core.rng import system_generator

SecretSource = Callable[[str], torch.Generator]
"""Returns the generator for a purpose."""


class SecretDraws:
    """One client's secret draws in one exchange, from the operating system.

    As with `Client.draw`, the same purpose has the same draws.
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    @property
    def were_used(self) -> bool:
        """Whether anything was drawn."""
        return bool(self._states)

    def __call__(self, purpose: str) -> torch.Generator:
        """Return a generator for a purpose."""
        if purpose not in self._states:
            self._states[purpose] = system_generator().get_state()
        generator = torch.Generator()
        generator.set_state(self._states[purpose])
        return generator
