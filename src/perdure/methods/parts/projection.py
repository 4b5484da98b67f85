"""Projection away from protected input spaces, for all layers at once.

Spaces are a tree {weight name: {"basis": O} or {"free": N}} (see algebra.subspaces.Space), so that
they travel and are kept as they are. Everything here is a pure function of tensors and runs under
vmap, where one set of spaces serves all clients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.algebra import subspaces
from perdure.algebra.subspaces import Space
from perdure.models.layers import Layer
from perdure.trees import Tensors, Tree, add, subtract


def project(change: Tensors, spaces: Tree) -> Tensors:
    """Changes of weights without what acts on protected inputs: D <- D - (D O) O^T."""
    return {
        name: _without(value, spaces[name]) if name in spaces else value
        for name, value in change.items()
    }


def _without(value: Tensor, space: Tensors) -> Tensor:
    """A convolution's weight counts as the matrix out x (channels * height * width)."""
    if value.dim() == 2:
        return subspaces.project(value, space)
    matrix = value.reshape(value.shape[0], -1)
    return subspaces.project(matrix, space).reshape(value.shape)


def projectors(spaces: Tree) -> Tree:
    """The spaces in the form in which projecting in every step is cheapest."""
    return {name: subspaces.projector(space) for name, space in spaces.items()}


def project_step(params: Tensors, before: Tensors, spaces: Tree) -> Tensors:
    """Parameters after a step with its displacement projected, for adaptive optimisers."""
    moved = {name: value for name, value in subtract(params, before).items() if name in spaces}
    return params | add({name: before[name] for name in moved}, project(moved, spaces))


def space_of(spaces: Tree, layer: Layer) -> Space:
    """A layer's protected space, empty if there is none yet."""
    return Space.read(spaces[layer.name]) if layer.name in spaces else Space.empty(layer.inputs)


def widen(spaces: Tree, layer: Layer, candidates: Tensor) -> Tree:
    """The spaces with the span of the candidates added to one layer's."""
    if candidates.shape[1] == 0:
        return spaces
    wider, _ = space_of(spaces, layer).extended(candidates.float())
    return spaces | {layer.name: wider.tree()} if wider.rank else spaces


def used(spaces: Tree, layers: tuple[Layer, ...]) -> dict[str, float]:
    """The share of each layer's input space that is protected."""
    return {layer.name: space_of(spaces, layer).rank / layer.inputs for layer in layers}


def left_over(change: Tensors, spaces: Tree) -> float:
    """||D O|| / ||D|| over the protected layers: 0 if nothing acts on protected inputs."""
    inside = torch.zeros((), dtype=torch.float64)
    whole = torch.zeros((), dtype=torch.float64)
    for name in spaces:
        if name in change:
            value = change[name].double()
            double = {key: half.double() for key, half in spaces[name].items()}
            inside += (value - _without(value, double)).square().sum()
            whole += value.square().sum()
    return float((inside / whole.clamp(min=1e-300)).sqrt())
