"""Which weights a subspace method protects, and what may still be trained after the first task.

Projection protects weight matrices. Biases, norms and running statistics have no inputs that could
be kept apart, so they stand still from the second task on: then a protected input gives the very
same output in all later tasks.
"""

from __future__ import annotations

from perdure.contract import Context
from perdure.core.errors import bad_value
from perdure.models.layers import Layer, linear_layer
from perdure.models.network import Network

HEAD = "head.weight"
FEATURES = "features"
"""The name under which the input of the head is observed."""


def protectable(network: Network) -> tuple[Layer, ...]:
    """Return the weight matrices that later tasks change too: the body's, and a shared head."""
    if network.outputs.kind == "shared":
        head = linear_layer("head", network.feature_size, network.outputs.classes, network.bias)
        return (*network.layers, head)
    return network.layers


def selected(network: Network, which: str | list[str]) -> tuple[Layer, ...]:
    """Return some of the protectable layers: all, first_half, second_half, or those named."""
    every = protectable(network)
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


def still_trained(
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
    known = {n for layer in protectable(network) for n in (layer.name, layer.bias_name)}
    free = {layer.name for layer in (*protected, *loose)} | {layer.bias_name for layer in loose}
    growing = network.outputs.kind == "growing"
    return tuple(
        name
        for name in context.trainable
        if name in free or (growing and name.startswith("head.")) or (norms and name not in known)
    )
