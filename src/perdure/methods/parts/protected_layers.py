"""Protected layers: which weights a projection method protects, and the subspaces of their inputs.

Projection protects weight matrices. Biases, norms and running statistics have no inputs that could
be separated, so they are frozen from the second task on; a protected input then gives exactly the
same output in all later tasks.

Subspaces are a tree {weight name: {"basis": O} or {"free": N}} (see algebra.subspaces.Subspace), so
that they can be sent and saved without conversion.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from perdure.algebra.subspaces import Subspace
from perdure.contract import Change, CollectedUploads, Context, OncePerTask, Server
from perdure.contract.transforms import project_out_all, project_out_weight
from perdure.core.errors import bad_value
from perdure.core.trees import Tensors
from perdure.models.layers import Layer, linear_layer
from perdure.models.network import Network

HEAD = "head.weight"
FEATURES = "features"
"""The name under which the input of the head is observed."""
Subspaces = dict[str, Tensors]
"""By weight name a protected subspace of the layer's inputs, as Space.tree gives it."""


# ---- layers


def protectable_layers(network: Network) -> tuple[Layer, ...]:
    """Return the weight matrices that later tasks change too: the body's, and a shared head."""
    if network.outputs.kind == "shared":
        head = linear_layer("head", network.feature_size, network.outputs.classes, network.bias)
        return (*network.layers, head)
    return network.layers


def select_layers(network: Network, which: str | list[str]) -> tuple[Layer, ...]:
    """Return some of the protectable layers: all, first_half, second_half, or those named."""
    every = protectable_layers(network)
    names, half = [layer.name for layer in every], len(every) // 2
    if isinstance(which, str):
        return {"all": every, "first_half": every[:half], "second_half": every[half:]}[which]
    for name in which:
        if name not in names:
            raise bad_value("method.layers", name, ", ".join(names))
    return tuple(layer for layer in every if layer.name in which)


def feature_layer(network: Network) -> Layer:
    """Return the input of the head as if it were that of a layer, to be observed."""
    return Layer(FEATURES, "linear", network.feature_size, 0, bias=False)


def trainable_names(
    context: Context,
    protected: tuple[Layer, ...],
    loose: tuple[Layer, ...] = (),
    norms: bool = False,
) -> tuple[str, ...]:
    """Return the names that are trained in this task: in the first one all, later fewer.

    Args:
        context: Where in the run we are.
        protected: Layers whose weights are projected.
        loose: Layers that are trained without protection.
        norms: Whether scales and shifts of norms are trained.
    """
    if context.task == 0:
        return context.trainable
    network = context.network
    known = {n for layer in protectable_layers(network) for n in (layer.name, layer.bias_name)}
    free = {layer.name for layer in (*protected, *loose)} | {layer.bias_name for layer in loose}
    growing = network.outputs.kind == "growing"
    return tuple(
        name
        for name in context.trainable
        if name in free or (growing and name.startswith("head.")) or (norms and name not in known)
    )


# ---- subspaces


def send_subspaces(server: Server, context: Context) -> dict[str, OncePerTask]:
    """Send the spaces that a method's server state holds as `spaces`, once per client and task."""
    spaces: Subspaces = server.state.spaces
    return {"spaces": OncePerTask(spaces)} if spaces else {}


def project_out_change(
    server: Server, change: Change, uploads: CollectedUploads, context: Context
) -> Change:
    """Take out of a round's change what acts on inputs in the server's `spaces`."""
    return replace(change, params=project_out_all(change.params, server.state.spaces))


def layer_subspace(spaces: Subspaces, layer: Layer) -> Subspace:
    """Return a layer's protected space, empty if there is none yet."""
    return (
        Subspace.from_tree(spaces[layer.name])
        if layer.name in spaces
        else Subspace.empty(layer.inputs)
    )


def add_directions(spaces: Subspaces, layer: Layer, candidates: Tensor) -> Subspaces:
    """Return the spaces with the span of the candidates added to one layer's."""
    if candidates.shape[1] == 0:
        return spaces
    wider, _ = layer_subspace(spaces, layer).extended(candidates.float())
    return spaces | {layer.name: wider.tree()} if wider.rank else spaces


def used_fraction(spaces: Subspaces, layers: tuple[Layer, ...]) -> dict[str, float]:
    """Return the fraction of each layer's input space that is protected."""
    return {layer.name: layer_subspace(spaces, layer).rank / layer.inputs for layer in layers}


def interference(change: Tensors, spaces: Subspaces) -> float:
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
