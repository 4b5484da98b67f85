"""Which weights a subspace method protects, and what may still be trained after the first task.

Projection protects weight matrices. Biases, norms and running statistics have no inputs that could
be kept apart, so they stand still from the second task on: then a protected input gives the very
same output for ever.
"""

from __future__ import annotations

from perdure.methods.base import Place
from perdure.models.layers import Layer, linear_layer
from perdure.models.network import Network

HEAD = "head.weight"
FEATURES = "features"
"""The name under which the input of the head is observed."""


def protectable(network: Network) -> tuple[Layer, ...]:
    """Every weight matrix that later tasks change too: the body's, and a head that tasks share."""
    if network.outputs.kind == "shared":
        head = linear_layer("head", network.feature_size, network.outputs.classes, network.bias)
        return (*network.layers, head)
    return network.layers


def feature_layer(network: Network) -> Layer:
    """The input of the head, observed as if it were that of a layer."""
    return Layer(FEATURES, "linear", network.feature_size, 0, bias=False)


def still_trained(
    names: tuple[str, ...],
    place: Place,
    protected: tuple[Layer, ...],
    loose: tuple[Layer, ...] = (),
    norms: bool = False,
) -> tuple[str, ...]:
    """Of the names trained by default, those that are trained in this task.

    protected: layers whose weights are projected. loose: layers that go on without protection.
    norms: whether scales and shifts of norms go on.
    """
    if place.task == 0:
        return names
    network = place.network
    known = {n for layer in protectable(network) for n in (layer.name, layer.bias_name)}
    free = {layer.name for layer in (*protected, *loose)} | {layer.bias_name for layer in loose}
    growing = network.outputs.kind == "growing"
    return tuple(
        name
        for name in names
        if name in free or (growing and name.startswith("head.")) or (norms and name not in known)
    )
