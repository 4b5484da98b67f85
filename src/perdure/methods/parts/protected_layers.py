"""Protected layers: which weights a projection method protects, their inputs, and subspaces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.sketches import ColumnSample, GramAccumulator
from perdure.algebra.subspaces import Subspace
from perdure.config.section import Fixed, Fraction, Probability, Search
from perdure.contract.context import Client, Context, Server, warn_nothing_sent
from perdure.contract.exchanges import OncePerTask
from perdure.contract.method import Method
from perdure.contract.step import target_losses
from perdure.contract.transforms import project_out_all
from perdure.contract.uploads import Change, CollectedUploads
from perdure.core.errors import bad_value
from perdure.core.trees import Tensors
from perdure.models.layers import Layer
from perdure.models.network import Network
from perdure.models.ops import PLAIN_CONV

# ---- Protected layers: which weights a projection method protects
#
# Projection protects weight matrices. Biases, norms and running statistics have no inputs that
# could be separated, so they are frozen from the second task on; a protected input then gives
# exactly the same output in all later tasks. So are weights of a custom module whose inputs cannot
# be recorded.

FEATURES = "features"
"""Name of the head's input where it is treated as the input of a layer."""


@dataclass(frozen=True)
class ProtectsLayers(Method):
    """A method that protects the inputs of layers, up to a threshold."""

    threshold: Annotated[Fraction, Search(0.6, 0.99)] = 0.95
    """Fraction of a layer's inputs that must be protected."""
    threshold_increment: Annotated[Probability, Fixed()] = 0.0
    """Added to `threshold` with each task."""

    def threshold_at(self, task: int) -> float:
        """Return the threshold of a task, at most 1."""
        return min(1.0, self.threshold + self.threshold_increment * task)


@dataclass(frozen=True)
class ChoosesLayers(ProtectsLayers):
    """A method whose protected layers are a choice, as in FOT, and what happens to the others."""

    layers: Literal["all", "first_half", "second_half"] | list[str] = "all"
    """Weights that FOT is applied to: all, first_half, second_half, or their names (Table 14)."""
    unprotected: Literal["frozen", "finetune"] = "frozen"
    """What happens to the other weights after the first task: frozen, or trained without protection
    (finetune)."""
    freeze_first: bool = False
    """Leave the first layer out of GPSE and freeze it after the first task, so that nothing
    computed from raw inputs is sent (section 5.2.2)."""
    train_norms: bool = False
    """Train scales and shifts of normalization layers after the first task, without protection, as
    in the paper."""

    def protected_layers(self, network: Network) -> tuple[Layer, ...]:
        """Return the layers whose updates are projected."""
        layers = layers_shared_by_tasks(network)
        names, half = [layer.name for layer in layers], len(layers) // 2
        if isinstance(self.layers, str):
            halves = {"all": names, "first_half": names[:half], "second_half": names[half:]}
            chosen = halves[self.layers]
        else:
            chosen = self.layers
        for name in chosen:
            if name not in names:
                raise bad_value("method.layers", name, f"one of {', '.join(names)}")
        return tuple(layer for layer in layers[int(self.freeze_first) :] if layer.name in chosen)

    def trainable(self, context: Context) -> tuple[str, ...]:
        """Return the names of the parameters that are trained in this task."""
        protected, others = self.protected_layers(context.network), tuple[Layer, ...]()
        if self.unprotected == "finetune":
            layers = layers_shared_by_tasks(context.network)[int(self.freeze_first) :]
            others = tuple(layer for layer in layers if layer not in protected)
        return trainable_names(context, protected, others, self.train_norms)


def layers_shared_by_tasks(network: Network) -> tuple[Layer, ...]:
    """Return the layers that several tasks train: those of the body, and a shared head."""
    if network.outputs.kind == "shared":
        return (*network.layers, *network.head_layers)
    return network.layers


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


# ---- Layer inputs of the global model on a client's examples, without dropout

_BATCH_ROWS = 64
"""Rows of a forward pass: all layers' inputs of so many rows are in memory at once."""
BLOCK_VALUES = 1 << 20
"""Values of a block of columns. Larger blocks leave the caches of a processor."""


class ColumnSink(Protocol):
    """Receives columns, some at a time."""

    def add(self, block: Tensor) -> None:
        """Add the columns of `block`, float [d, n]."""


def layer_columns(x: Tensor, layer: Layer) -> Tensor:
    """Return a layer's input as a matrix X of columns to which its weight is applied, [d, n].

    For a convolution a column is a patch (im2col with the layer's geometry), with the entries in
    the order of W.reshape(outputs, -1): channels, then height, then width. Of a grouped convolution
    the patches of all groups are columns, so that one subspace protects all its kernels.
    """
    if layer.kind == "linear":
        return x.reshape(-1, x.shape[-1]).T
    if layer.kernel == (1, 1) and layer.geometry == PLAIN_CONV:  # every pixel is a patch
        return x.transpose(0, 1).reshape(layer.inputs, -1)
    stride, padding, dilation, groups = layer.geometry.args
    patches = F.unfold(x, layer.kernel, dilation, padding, stride)
    patches = patches.reshape(len(x), groups, layer.inputs, -1)
    return patches.permute(2, 0, 1, 3).reshape(layer.inputs, -1)


def column_blocks(x: Tensor, layer: Layer) -> Iterator[Tensor]:
    """Yield the columns of a layer's input, some rows of x at a time."""
    values = x[0].numel() * math.prod(layer.kernel)
    for rows in torch.split(x, max(1, BLOCK_VALUES // values)):
        yield layer_columns(rows, layer)


def collect_layer_inputs(
    client: Client, layers: tuple[Layer, ...], sinks: Mapping[str, ColumnSink], rows: Tensor
) -> None:
    """Add the input columns of each layer to a sink, a block at a time."""
    with torch.no_grad():
        for batch_rows in torch.split(rows, _BATCH_ROWS):
            layer_inputs: Tensors = {}
            features = client.features(client.data.batch(batch_rows), layer_inputs=layer_inputs)
            heads = {layer.name: features for layer in client.context.network.head_layers}
            layer_inputs |= {**heads, FEATURES: features}
            for layer in layers:
                for block in column_blocks(layer_inputs[layer.name], layer):
                    sinks[layer.name].add(block)


def gram_roots(client: Client, layers: tuple[Layer, ...]) -> Tensors:
    """Return by weight name the symmetric root of X X^T, with the layer's inputs X as columns."""
    grams = {layer.name: GramAccumulator() for layer in layers}
    collect_layer_inputs(client, layers, grams, client.data.index)
    return {name: gram.root() for name, gram in grams.items()}


def sample_layer_inputs(
    client: Client,
    layers: tuple[Layer, ...],
    max_examples: int,
    max_columns: int,
    generator: torch.Generator,
) -> Tensors:
    """Return by weight name a random sample of the layer's input columns, float [d, columns].

    The columns are drawn without replacement from those of at most `max_examples` rows.
    """
    index = client.data.index
    chosen = torch.randperm(len(index), generator=generator)[:max_examples]
    samples = {layer.name: ColumnSample(max_columns, generator) for layer in layers}
    collect_layer_inputs(client, layers, samples, index[chosen.to(index.device)])
    return {name: sample.columns() for name, sample in samples.items()}


# ---- The protected subspaces of layers' inputs
#
# They are a tree {weight name: {"basis": O} or {"free": N}} (see algebra.subspaces.Subspace), so
# that they can be sent and saved without conversion.

Subspaces = dict[str, Tensors]
"""By weight name a protected subspace of the layer's inputs, as `Subspace.tree` returns it."""
NEARLY_FULL = 0.9
"""Fraction of a layer's input space in use above which a run warns."""


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
    return {layer.name: layer_subspace(spaces, layer).fraction for layer in layers}


def full_layers_warnings(method: str, spaces: Subspaces, threshold: float) -> dict[str, str]:
    """Return a warning for each layer whose input space is nearly used up."""
    used = {name: Subspace.from_tree(space).fraction for name, space in spaces.items()}
    return {
        f"space of {name}": (
            f"{method}: {fraction:.0%} of the input space of {name} is protected, so that the "
            f"layer hardly learns any more (a threshold below {threshold:g} protects less)"
        )
        for name, fraction in used.items()
        if fraction > NEARLY_FULL
    }


def warn_nothing_protected(method: str, context: Context, layers: tuple[Layer, ...]) -> None:
    """Log that no client sent anything about the inputs of its layers in a task."""
    names = ", ".join(layer.name for layer in layers)
    warn_nothing_sent(method, context, f"nothing of the task is protected in {names}")


# ---- How much projection restricts a new task and protects old ones (FedProTIP, section 5,
# Figure 2)
#
# rho_t: the fraction of the current task's squared gradient that remains after projection
#     (assumption 4).
# beta_tau^(t): the fraction of an old task's gradient norm that updates can still reach
#     (assumption 5).
#
# Both are computed over the protected weights. Old data is not available when a new task is
# trained, so the gradient of task tau is the one at the end of task tau, averaged over clients; the
# same holds for rho.


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
