"""Protected layers: weights that a projection method protects, and subspaces of their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from perdure.algebra.subspaces import Subspace
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import OncePerTask
from perdure.contract.step import target_losses
from perdure.contract.transforms import project_out_all, project_out_weight
from perdure.contract.uploads import Change, CollectedUploads
from perdure.core.errors import bad_value
from perdure.core.trees import Tensors
from perdure.models.layers import Layer
from perdure.models.network import Network

# ------------------------------------------------------------------------------------------------
# The fraction of layer inputs outside a protected subspace (FOT, eq. 12).
# ------------------------------------------------------------------------------------------------


def outside_norms(outside: Tensor, inputs: Tensor, squared: bool) -> Tensor:
    """Return one client's term of rho, the fraction of inputs X outside O (eq. 12).

    Args:
        outside: X*, the inputs after projecting out O, as columns.
        inputs: X, the inputs as columns.
        squared: Whether to return both squared norms [2], to be summed over clients, instead of the
            ratio ||X*|| / ||X||, to be averaged.

    """
    norms = torch.stack([outside.double().norm(), inputs.double().norm()])
    if squared:
        return norms.square()
    return (norms[0] / norms[1].clamp(min=1e-30)).float()


def outside_fraction(mean: Tensor) -> float:
    """Return rho of all clients, in [0, 1], from the mean of their `outside_norms`."""
    rho = mean[0] / mean[1].clamp(min=1e-30) if mean.dim() else mean
    return min(1.0, max(0.0, float(rho)))


# ------------------------------------------------------------------------------------------------
# Protected layers: which weights a projection method protects, and the subspaces of their inputs.
#
# Projection protects weight matrices. Biases, norms and running statistics have no inputs that
# could be separated, so they are frozen from the second task on; a protected input then gives
# exactly the same output in all later tasks. So are weights of a custom module whose inputs cannot
# be recorded.
#
# Subspaces are a tree {weight name: {"basis": O} or {"free": N}} (see algebra.subspaces.Subspace),
# so that they can be sent and saved without conversion.
# ------------------------------------------------------------------------------------------------

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
    """Return some of the protectable layers."""
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
    in_layers |= set(network.body.unprotected)
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


# ------------------------------------------------------------------------------------------------
# Warnings about protected layers: nothing is left to learn in, or nothing is protected.
# ------------------------------------------------------------------------------------------------

NEARLY_FULL = 0.9
"""Fraction of a layer's input space in use above which a run warns."""


def full_layers_warnings(
    method: str, used: Mapping[str, float], threshold: float
) -> dict[str, str]:
    """Return a warning for each layer whose input space is nearly used up."""
    return {
        f"space of {name}": (
            f"{method}: {fraction:.0%} of the input space of {name} is protected, so that the "
            f"layer hardly learns any more (a threshold below {threshold:g} protects less)"
        )
        for name, fraction in used.items()
        if fraction > NEARLY_FULL
    }


def noise_warning(key: str, drowned: Sequence[str]) -> dict[str, str]:
    """Return a warning if nothing but noise was found in the sketches of some layers."""
    if not drowned:
        return {}
    layers = "layer" if len(drowned) == 1 else "layers"
    return {
        "sketch noise": (
            f"{key}: the noise drowns the signal in {layers} {', '.join(drowned)}; nothing is "
            "protected there (less noise or more clients would leave some of it)"
        )
    }


# ------------------------------------------------------------------------------------------------
# How much projection restricts a new task and protects old ones (FedProTIP, section 5, Figure 2).
#
# rho_t: the fraction of the current task's squared gradient that remains after projection
#     (assumption 4).
# beta_tau^(t): the fraction of an old task's gradient norm that updates can still reach
#     (assumption 5).
#
# Both are computed over the protected weights. Old data is not available when a new task is
# trained, so the gradient of task tau is the one at the end of task tau, averaged over clients; the
# same holds for rho.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProjectionRecord:
    """rho and beta of the tasks so far."""

    rho: list[float] = field(default_factory=list)
    """rho of each task."""
    beta: list[list[float]] = field(default_factory=list)
    """After each task, beta of each task so far."""
    gradients: dict[str, Tensors] = field(default_factory=dict)
    """By task (its index as a string) the mean gradient of the protected weights at its end."""

    def with_task(
        self, task: int, gradient: Tensors, before: Subspaces, after: Subspaces
    ) -> ProjectionRecord:
        """Return the record with one more task."""
        gradients = self.gradients | {str(task): gradient}
        beta = [surviving_fraction(gradients[key], after) for key in sorted(gradients, key=int)]
        rho = surviving_fraction(gradient, before) ** 2
        return ProjectionRecord([*self.rho, rho], [*self.beta, beta], gradients)


def local_gradient(client: Client, layers: tuple[Layer, ...]) -> Tensors:
    """Return the gradient of a client's mean loss with respect to the protected weights."""
    names = [layer.name for layer in layers]
    leaves = {name: client.params[name].detach().clone().requires_grad_() for name in names}
    total = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    params = client.params | leaves
    for batch in client.data.batches():
        loss = target_losses(client.logits(batch, params), batch).sum()
        for name, grad in zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            total[name] += grad
    return {name: value / len(client.data) for name, value in total.items()}


def surviving_fraction(gradient: Tensors, spaces: Subspaces) -> float:
    """Return ||P g|| / ||g||, where P projects out the protected subspaces."""
    whole = _squared_norm(gradient)
    remaining = _squared_norm(project_out_all(gradient, spaces))
    return float((remaining / max(whole, 1e-300)) ** 0.5)


def _squared_norm(gradient: Tensors) -> float:
    return sum(float(g.double().square().sum()) for g in gradient.values())
