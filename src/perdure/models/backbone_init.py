"""The initial weights of a backbone, and the selection of those that are trained.

A backbone's weights are read once per process. They are the initial values of a backbone that is
fine-tuned, and constants of a frozen one. Constants are not parameters: they are neither sent nor
saved with a run.
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
"""Shape of each parameter, by name."""


class Pretrained(Protocol):
    """A source of pretrained weights."""

    def weights(self, shapes: Shapes, device: str) -> Tensors:
        """Return the values of all parameters, which are read once per process."""


class BackboneShapes(Protocol):
    """The properties of a backbone that determine its initial weights."""

    @property
    def encoder(self) -> Encoder:
        """Its stack of blocks."""

    @property
    def shapes(self) -> Shapes:
        """Shape of each of its parameters."""


@dataclass(frozen=True)
class BackboneInit:
    """The source of a backbone's initial weights, and the number of blocks that are trained."""

    pretrained: Pretrained | None = None
    """Pretrained weights. If None, the weights are random."""
    trained_blocks: int | None = None
    """Number of trained blocks: the last ones, with the final norm. If None, the whole backbone is
    trained."""

    def initial_params(self, body: BackboneShapes, generator: torch.Generator) -> Tensors:
        """Return the initial values of the trained parameters."""
        if self.pretrained is None and self.trained_blocks is None:
            return random_params(body.shapes, _all_layers(body), generator)
        constants = self.constants(body, "cpu")
        return {name: constants[name].clone() for name in self.trained_names(body)}

    def trained_names(self, body: BackboneShapes) -> tuple[str, ...]:
        """Return the names of the trained parameters."""
        if self.trained_blocks is None:
            return tuple(body.shapes)
        return body.encoder.last_block_names(self.trained_blocks)

    def trained_layers(self, body: BackboneShapes, before: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Return the trained weight matrices; `before` are those in front of the blocks."""
        names = set(self.trained_names(body))
        blocks = [layer for block in body.encoder.blocks for layer in block]
        return tuple(layer for layer in (*before, *blocks) if layer.name in names)

    def constants(self, body: BackboneShapes, device: str) -> Tensors:
        """Return the initial values of all parameters; random ones are the same in every run."""
        if self.pretrained is not None:
            return self.pretrained.weights(body.shapes, device)
        return _random(tuple(body.shapes.items()), _all_layers(body), device)

    def all_params(self, body: BackboneShapes, params: Tensors, device: str) -> Tensors:
        """Return all parameters: the trained ones in `params`, and the others as constants."""
        return params if self.trained_blocks is None else self.constants(body, device) | params


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
