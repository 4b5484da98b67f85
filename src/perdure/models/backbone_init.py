"""What a backbone starts from, and which part of it is trained.

A backbone's weights are read once a process. They serve as first values where the backbone is
fine-tuned, and as constants where it is frozen: constants are no parameters, so they neither travel
nor are they saved with a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch

from perdure.core.rng import Rng
from perdure.core.trees import Tensors, to_device
from perdure.models.layers import Layer
from perdure.models.transformer import Encoder, random_params

Shapes = dict[str, tuple[int, ...]]


class Pretrained(Protocol):
    """Weights from elsewhere."""

    def weights(self, shapes: Shapes, device: str) -> Tensors:
        """The values of all parameters, read once a process."""


class BackboneShapes(Protocol):
    """What a start has to know of the backbone that it is for."""

    @property
    def encoder(self) -> Encoder:
        """Its blocks."""

    @property
    def shapes(self) -> Shapes:
        """The shape of each of its parameters."""


@dataclass(frozen=True)
class BackboneInit:
    """Where a backbone's first values come from, and how many of its blocks are trained."""

    pretrained: Pretrained | None = None
    """None: random."""
    blocks: int | None = None
    """Only the last ones are trained, with the final norm; None: the whole backbone."""

    def trained(self, body: BackboneShapes, generator: torch.Generator) -> Tensors:
        """First values of the parameters that are trained."""
        if self.pretrained is None and self.blocks is None:
            return random_params(body.shapes, _all_layers(body), generator)
        constants = self.constants(body, "cpu")
        return {name: constants[name].clone() for name in self.names(body)}

    def names(self, body: BackboneShapes) -> tuple[str, ...]:
        """Names of the parameters that are trained."""
        return tuple(body.shapes) if self.blocks is None else body.encoder.last(self.blocks)

    def trained_layers(self, body: BackboneShapes, before: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """The weight matrices that are trained; `before`: those ahead of the blocks."""
        names = set(self.names(body))
        blocks = [layer for block in body.encoder.blocks for layer in block]
        return tuple(layer for layer in (*before, *blocks) if layer.name in names)

    def constants(self, body: BackboneShapes, device: str) -> Tensors:
        """All parameters as they start. Random ones are the same in every run."""
        if self.pretrained is not None:
            return self.pretrained.weights(body.shapes, device)
        return _random(tuple(body.shapes.items()), _all_layers(body), device)

    def full(self, body: BackboneShapes, params: Tensors, device: str) -> Tensors:
        """All parameters: the trained ones, and the rest as constants."""
        return params if self.blocks is None else self.constants(body, device) | params


RANDOM_INIT = BackboneInit()


def _all_layers(body: BackboneShapes) -> tuple[Layer, ...]:
    return tuple(layer for block in body.encoder.blocks for layer in block)


@lru_cache(maxsize=4)
def _random(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], layers: tuple[Layer, ...], device: str
) -> Tensors:
    generator = Rng(0).torch_generator("backbone")
    values: Tensors = to_device(
        random_params(dict(shapes), layers, generator), torch.device(device)
    )
    return values
