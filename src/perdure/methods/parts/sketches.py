"""What FOT sums over clients: sketches with noise, and the fractions outside the subspace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from perdure.config.section import Fixed, PositiveFloat
from perdure.contract.context import Context
from perdure.contract.method import Method
from perdure.contract.uploads import CollectedUploads
from perdure.core.registry import is_installed
from perdure.core.trees import Tensors
from perdure.privacy import accounting
from perdure.privacy.accounting import clip_norm, fot_sigma, gaussian_sigma

# ---- rho, the fraction of all clients' inputs X that lies outside the protected subspace (eq.
# 12): each
# client sends a term of it, computed from X and from its part X* outside.

_TINY = 1e-30
"""Norms are taken for at least this: inputs that are all zero are outside of nothing."""


class NormRatios:
    """The paper's rho: the clients' ratios ||X*|| / ||X||, averaged over their examples."""

    by_examples = True
    """Whether a client's term counts as often as it has examples."""
    largest: float | None = 1.0
    """The largest value of a term."""

    def term(self, outside: Tensor, inputs: Tensor) -> Tensor:
        """Return the ratio of the norms of one client's X* and X, both with inputs as columns."""
        ratio: Tensor = outside.double().norm() / inputs.double().norm().clamp(min=_TINY)
        return ratio.float()

    def fraction(self, mean: Tensor) -> float:
        """Return rho, in [0, 1], from the mean of the terms."""
        return min(1.0, max(0.0, float(mean)))


class EnergyRatio:
    """The ratio of the clients' summed squared norms: rho of all inputs in one place."""

    by_examples = False
    largest: float | None = None
    """Squared norms have no bound that is known beforehand."""

    def term(self, outside: Tensor, inputs: Tensor) -> Tensor:
        """Return the squared norms of one client's X* and X, [2]."""
        return torch.stack([outside.double().norm(), inputs.double().norm()]).square()

    def fraction(self, mean: Tensor) -> float:
        """Return rho, in [0, 1], from the mean of the terms."""
        return min(1.0, max(0.0, float(mean[0] / mean[1].clamp(min=_TINY))))


# ---- The Gaussian mechanism on sketches (FOT, appendix H), and the privacy that it guarantees


@dataclass(frozen=True)
class SketchNoise:
    """Clips each client's sketch of a layer to the norm L, and adds N(0, sigma^2) to each entry."""

    kind: Literal["paper", "standard"]
    """`paper`: sigma^2 = log(1.25 / delta) / (epsilon^2 C), as printed. `standard`: the Gaussian
    mechanism for the sum over clients, with its factor 2 and L; the fraction in [0, 1] that a
    client sends with its sketch gets noise, too."""
    epsilon: float
    """Privacy level of one sum."""
    delta: float
    """Probability with which the privacy level may be exceeded."""
    clip: float
    """L: largest Frobenius norm of a client's sketch."""

    def sigma(self, clients: int, sensitivity: float) -> float:
        """Return the standard deviation of the noise that each of C = `clients` clients adds."""
        count = max(1, clients)
        if self.kind == "paper":
            return fot_sigma(self.epsilon, self.delta, count)
        return gaussian_sigma(self.epsilon, self.delta, count, sensitivity)

    def add_noise(
        self, sketches: Tensors, fractions: Tensors, clients: int, generator: torch.Generator
    ) -> tuple[Tensors, Tensors]:
        """Return one client's sketches and fractions as they are sent."""
        sigma = self.sigma(clients, self.clip)
        noisy = {
            name: clip_norm(sketch, self.clip) + _noise(sketch, sigma, generator)
            for name, sketch in sketches.items()
        }
        if self.kind == "paper":
            return noisy, fractions
        sigma = self.sigma(clients, 1.0)
        return noisy, {name: f + _noise(f, sigma, generator) for name, f in fractions.items()}

    def describe_guarantee(self, layers: int, tasks: int | None = None) -> str:
        """Return a sentence about what this noise does and does not guarantee."""
        level = f"({self.epsilon:g}, {self.delta:g})"
        if self.kind == "paper":
            return (
                f"privacy 'paper': noise as printed in FOT's appendix H for {level}; no (epsilon, "
                "delta) guarantee is claimed, because the printed variance lacks a factor 2 and "
                "the fractions that are sent with the sketches have no noise"
            )
        text = self._standard_guarantee(level, layers, tasks)
        if self.epsilon < 1:
            return text
        return (
            f"{level} of a single sum is not a proved guarantee, since its formula holds for "
            f"epsilon < 1 only; {text}"
        )

    def _standard_guarantee(self, level: str, layers: int, tasks: int | None) -> str:
        over = "per task" if tasks is None else f"tasks so far: {tasks}"
        releases = 2 * layers * (1 if tasks is None else tasks)
        return (
            "privacy 'standard': under secure aggregation and if every client uploads, each "
            f"summed sketch and each fraction is {level}-differentially private for adding or "
            f"removing a client (for replacing one, epsilon is {2 * self.epsilon:g}); over "
            f"{layers} layers ({over}) {self._composed(releases)}; "
            "the model updates themselves are not covered; in a simulation the noise derives "
            "from the run's seed and can be subtracted"
        )

    def _composed(self, releases: int) -> str:
        """Return the guarantee of all sums together; Renyi accounting is tighter."""
        basic = f"basic composition gives ({releases * self.epsilon:g}, {releases * self.delta:g})"
        if not is_installed("dp_accounting"):
            return f"{basic} (a tighter bound requires pip install 'perdure[privacy]')"
        total = accounting.epsilon(self.sigma(1, 1.0), releases, self.delta)
        return f"{basic}, and Renyi accounting of the same noise ({total:.4g}, {self.delta:g})"


def _noise(value: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    return (sigma * torch.randn(value.shape, generator=generator)).to(value)


@dataclass(frozen=True)
class SendsSketches(Method):
    """A method whose clients may add noise to the sketches that they send."""

    sketch_noise: Literal["none", "paper", "standard"] = "none"
    """Noise on the sketches (appendix H): none, as printed in the paper (paper), or with an
    (epsilon, delta) guarantee (standard)."""
    epsilon: Annotated[PositiveFloat, Fixed()] = 5.0
    """Sketch noise: epsilon per task."""
    delta: Annotated[float, Field(gt=0, lt=1), Fixed()] = 1e-5
    """Sketch noise: delta."""
    clip: Annotated[PositiveFloat, Fixed()] = 1.0
    """Sketch noise: maximum norm of a client's sketch."""

    @property
    def noise(self) -> SketchNoise | None:
        """The mechanism of appendix H. None if sketches have no noise."""
        if self.sketch_noise == "none":
            return None
        return SketchNoise(self.sketch_noise, self.epsilon, self.delta, self.clip)

    def summed_noise(self, uploads: CollectedUploads, context: Context) -> float:
        """Return the standard deviation of all noise on the entries of a summed sketch.

        Where `privacy.clip` scales noise down that clients added before, it is less.
        """
        added, counted = uploads.noise.get("sketch", 0.0), len(uploads.clients)
        if not self.noise:
            return added
        sigma = self.noise.sigma(context.clients_with_data, self.clip)
        return math.hypot(added, sigma * math.sqrt(counted))

    def noise_warnings(self, drowned: Sequence[str]) -> dict[str, str]:
        """Return a warning if nothing but noise was found in the sketches of some layers."""
        if not drowned:
            return {}
        key = "method.sketch_noise" if self.noise else "privacy.noise"
        layers = "layer" if len(drowned) == 1 else "layers"
        return {
            "sketch noise": (
                f"{key}: the noise drowns the signal in {layers} {', '.join(drowned)}; nothing is "
                "protected there (less noise or more clients would leave some of it)"
            )
        }
