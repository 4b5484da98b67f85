"""Protected subspaces of the layers' inputs, all layers at once.

Spaces are a tree {weight name: {"basis": O} or {"free": N}} (see algebra.subspaces.Space), so that
they travel and are kept as they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from perdure.algebra.subspaces import Subspace
from perdure.contract import Change, CollectedUploads, Context, OncePerTask, Server
from perdure.contract.transforms import project_out_all, project_out_weight
from perdure.core.trees import Tensors
from perdure.models.layers import Layer

Spaces = dict[str, Tensors]
"""By weight name a protected subspace of the layer's inputs, as Space.tree gives it."""


def broadcast_spaces(server: Server, context: Context) -> dict[str, OncePerTask]:
    """Send the spaces that a method's server state holds as `spaces`, once per client and task."""
    spaces: Spaces = server.state.spaces
    return {"spaces": OncePerTask(spaces)} if spaces else {}


def project_change(
    server: Server, change: Change, uploads: CollectedUploads, context: Context
) -> Change:
    """Take out of a round's change what acts on inputs in the server's `spaces`."""
    return replace(change, params=project_out_all(change.params, server.state.spaces))


def space_of(spaces: Spaces, layer: Layer) -> Subspace:
    """Return a layer's protected space, empty if there is none yet."""
    return (
        Subspace.from_tree(spaces[layer.name])
        if layer.name in spaces
        else Subspace.empty(layer.inputs)
    )


def add_directions(spaces: Spaces, layer: Layer, candidates: Tensor) -> Spaces:
    """Return the spaces with the span of the candidates added to one layer's."""
    if candidates.shape[1] == 0:
        return spaces
    wider, _ = space_of(spaces, layer).extended(candidates.float())
    return spaces | {layer.name: wider.tree()} if wider.rank else spaces


def used_fraction(spaces: Spaces, layers: tuple[Layer, ...]) -> dict[str, float]:
    """Return the fraction of each layer's input space that is protected."""
    return {layer.name: space_of(spaces, layer).rank / layer.inputs for layer in layers}


def interference(change: Tensors, spaces: Spaces) -> float:
    """Return ||D O|| / ||D|| over the protected layers: 0 if nothing acts on protected inputs."""
    inside = torch.zeros((), dtype=torch.float64)
    whole = torch.zeros((), dtype=torch.float64)
    for name in spaces:
        if name in change:
            value = change[name].double()
            double = {key: half.double() for key, half in spaces[name].items()}
            inside += (value - project_out_weight(value, double)).square().sum()
            whole += value.square().sum()
    return float((inside / whole.clamp(min=1e-300)).sqrt())
