"""The additive Gaussian mechanism on sketches (FOT, appendix H), and what it guarantees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perdure.core.optional import is_installed
from perdure.core.trees import Tensors
from perdure.privacy import renyi as accounting
from perdure.privacy.gaussian_mechanism import clip_norm, fot_sigma, gaussian_sigma


@dataclass(frozen=True)
class SketchNoise:
    """Each client clips its sketch of a layer to the norm L and adds N(0, sigma^2) to each entry.

    paper: sigma^2 = log(1.25 / delta) / (epsilon^2 C), as printed.
    standard: the Gaussian mechanism for the sum over clients, with its factor 2 and L; the share
    that a client sends along, a number in [0, 1], is noised likewise.
    """

    kind: Literal["paper", "standard"]
    epsilon: float
    delta: float
    limit: float

    def sigma(self, clients: int, sensitivity: float) -> float:
        """Return the standard deviation of the noise of one of C clients."""
        count = max(1, clients)
        if self.kind == "paper":
            return fot_sigma(self.epsilon, self.delta, count)
        return gaussian_sigma(self.epsilon, self.delta, count, sensitivity)

    def applied(
        self, sketches: Tensors, shares: Tensors, clients: int, generator: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Return sketches and shares as they are sent."""
        sigma = self.sigma(clients, self.limit)
        noisy = {
            name: clip_norm(sketch, self.limit) + _noise(sketch, sigma, generator)
            for name, sketch in sketches.items()
        }
        if self.kind == "paper":
            return noisy, shares
        sigma = self.sigma(clients, 1.0)
        return noisy, {name: s + _noise(s, sigma, generator) for name, s in shares.items()}

    def claim(self, layers: int, tasks: int | None = None) -> str:
        """Return in words what this noise does and does not guarantee.

        Args:
            layers: Layers of which sketches are sent.
            tasks: Tasks so far. If None, the claim is per task.
        """
        level = f"({self.epsilon:g}, {self.delta:g})"
        if self.kind == "paper":
            return (
                f"privacy 'paper': noise as printed in FOT's appendix H for {level}; no (epsilon, "
                "delta) guarantee is claimed, because the printed variance lacks a factor 2 and "
                "the shares that go along are not noised"
            )
        text = self._standard_claim(level, layers, tasks)
        if self.epsilon < 1:
            return text
        return (
            f"{level} of a single sum is not a proved guarantee, since its formula holds for "
            f"epsilon < 1 only; {text}"
        )

    def _standard_claim(self, level: str, layers: int, tasks: int | None) -> str:
        over = "per task" if tasks is None else f"tasks so far: {tasks}"
        releases = 2 * layers * (1 if tasks is None else tasks)
        return (
            "privacy 'standard': under secure aggregation with every client reporting, each "
            f"summed sketch and each share is {level}-differentially private for adding or "
            f"removing a client (for replacing one, epsilon is {2 * self.epsilon:g}); over "
            f"{layers} layers ({over}) {self._composed(releases)}; "
            "the model updates themselves are not covered"
        )

    def _composed(self, releases: int) -> str:
        """Return what all these sums give together; Renyi accounting is the tighter figure."""
        basic = f"basic composition gives ({releases * self.epsilon:g}, {releases * self.delta:g})"
        if not is_installed("dp_accounting"):
            return f"{basic} (with the extra 'privacy' a tighter figure would stand here)"
        total = accounting.epsilon(self.sigma(1, 1.0), releases, self.delta)
        return f"{basic}, and Renyi accounting of the same noise ({total:.4g}, {self.delta:g})"


def _noise(like: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    return (sigma * torch.randn(like.shape, generator=generator)).to(like)
