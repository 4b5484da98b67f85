"""Protected layers: which weights a projection method protects, and the subspaces of their inputs.

Projection protects weight matrices. Biases, norms and running statistics have no inputs that could
be separated, so they are frozen from the second task on; a protected input then gives exactly the
same output in all later tasks. So are weights of a custom module whose inputs cannot be recorded.

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
from perdure.models.layers import Layer
from perdure.models.network import Network

HEAD = "head.weight"
"""Name of the weight of a shared head."""
FEATURES = "features"
"""Name of the head's input where it is treated as the input of a layer."""
Subspaces = dict[str, Tensors]
"""By weight name a protected subspace of the layer's inputs, as `Subspace.tree` returns it."""


# ---- layers


def layers_shared_by_tasks(network: Network) -> tuple[Layer, ...]:
    """Return the layers that several tasks train: those of the body, and a shared head."""
    if network.outputs.kind == "shared":
        return (*network.layers, *network.head_layers)
    return network.layers


def select_layers(network: Network, selection: str | list[str]) -> tuple[Layer, ...]:
    """Return some of the protectable layers.

    Args:
        network: The network.
        selection: all, first_half, second_half, or a list of weight names.
    """
    layers = layers_shared_by_tasks(network)
    names, half = [layer.name for layer in layers], len(layers) // 2
    if isinstance(selection, str):
        halves = {"all": layers, "first_half": layers[:half], "second_half": layers[half:]}
        return halves[selection]
    for name in selection:
        if name not in names:
            raise bad_value("method.layers", name, f"one of {', '.join(names)}")
    return tuple(layer for layer in layers if layer.name in selection)


def feature_layer(network: Network) -> Layer:
    """Return a layer that stands for the head's input, so that it can be collected like others."""
    return Layer(FEATURES, "linear", network.feature_size, 0, bias=False)


def trainable_names(
    context: Context,
    protected: tuple[Layer, ...],
    unprotected: tuple[Layer, ...] = (),
    train_norms: bool = False,
) -> tuple[str, ...]:
    """Return the names of the parameters that are trained in this task.

    In the first task these are all parameters; later the protected weights, a growing head, and
    what the last two arguments add.

    Args:
        context: Position in the run.
        protected: Layers whose weights are projected.
        unprotected: Layers that are trained without protection.
        train_norms: Whether scales and shifts of norms are trained.
    """
    if context.task == 0:
        return context.trainable
    network = context.network
    in_layers = {
        n for layer in layers_shared_by_tasks(network) for n in (layer.name, layer.bias_name)
    }
    trained = {layer.name for layer in (*protected, *unprotected)}
    trained |= {layer.bias_name for layer in unprotected}
    growing = network.outputs.kind == "growing"
    in_layers |= set(network.unprotected)
    return tuple(
        name
        for name in context.trainable
        if name in trained
        or (growing and name.startswith("head."))
        or (train_norms and name not in in_layers)
    )


# ---- subspaces


def send_subspaces(server: Server, context: Context) -> dict[str, OncePerTask]:
    """Send the protected subspaces (`spaces` of the server state) once per client and task."""
    spaces: Subspaces = server.state.spaces
    return {"spaces": OncePerTask(spaces)} if spaces else {}


def project_out_change(
    server: Server, change: Change, uploads: CollectedUploads, context: Context
) -> Change:
    """Return a round's change, projected out of the protected subspaces of the server state."""
    return replace(change, params=project_out_all(change.params, server.state.spaces))


def layer_subspace(spaces: Subspaces, layer: Layer) -> Subspace:
    """Return a layer's protected subspace, which is empty before the first task's end."""
    if layer.name not in spaces:
        return Subspace.empty(layer.inputs)
    return Subspace.from_tree(spaces[layer.name])


def add_directions(spaces: Subspaces, layer: Layer, candidates: Tensor) -> Subspaces:
    """Return the subspaces, with directions added to that of one layer.

    Args:
        spaces: Subspaces of all layers.
        layer: The layer.
        candidates: float [inputs, directions]. The columns need not be orthogonal.
    """
    if candidates.shape[1] == 0:
        return spaces
    extended, _ = layer_subspace(spaces, layer).extended(candidates.float())
    return spaces | {layer.name: extended.tree()} if extended.rank else spaces


def used_fraction(spaces: Subspaces, layers: tuple[Layer, ...]) -> dict[str, float]:
    """Return by weight name the fraction of the layer's input space that is protected."""
    return {layer.name: layer_subspace(spaces, layer).rank / layer.inputs for layer in layers}


def interference(change: Tensors, spaces: Subspaces) -> float:
    """Return ||D O|| / ||D|| over the protected layers: 0 if no protected input is disturbed."""
    inside = torch.zeros((), dtype=torch.float64)
    whole = torch.zeros((), dtype=torch.float64)
    for name in spaces:
        if name in change:
            value = change[name].double()
            subspace = {form: matrix.double() for form, matrix in spaces[name].items()}
            inside += (value - project_out_weight(value, subspace)).square().sum()
            whole += value.square().sum()
    return float((inside / whole.clamp(min=1e-300)).sqrt())
