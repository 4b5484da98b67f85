"""Core bases: the principal directions of a client's layer inputs outside protected subspaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.sketches import ColumnSample, GramAccumulator, gaussian_sketch
from perdure.algebra.subspaces import Subspace, energy_rank, mass_rank, principal_directions
from perdure.contract.checks import refuse
from perdure.contract.context import Client, Context
from perdure.contract.uploads import CollectedUploads, Each, Sum
from perdure.core.trees import Tensors
from perdure.methods.parts.closed_form import warn_nothing_sent
from perdure.methods.parts.protected_layers import (
    FEATURES,
    Subspaces,
    add_directions,
    layer_subspace,
)
from perdure.methods.parts.sketches import sketch_spectrum
from perdure.models.layers import Layer
from perdure.models.ops import PLAIN_CONV

# ------------------------------------------------------------------------------------------------
# Layer inputs of the global model on a client's examples, without dropout.
# ------------------------------------------------------------------------------------------------

_BATCH_ROWS = 64
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


def collect_layer_inputs(
    client: Client, layers: tuple[Layer, ...], sinks: Mapping[str, ColumnSink], rows: Tensor
) -> None:
    """Add the input columns of each layer to a sink."""
    with torch.no_grad():
        for batch_rows in torch.split(rows, _BATCH_ROWS):
            layer_inputs: Tensors = {}
            features = client.features(client.data.batch(batch_rows), layer_inputs=layer_inputs)
            heads = {layer.name: features for layer in client.context.network.head_layers}
            layer_inputs |= {**heads, FEATURES: features}
            for layer in layers:
                for block in column_blocks(layer_inputs[layer.name], layer):
                    sinks[layer.name].add(block)


def column_blocks(x: Tensor, layer: Layer) -> Iterator[Tensor]:
    """Yield the columns of a layer's input, some rows of x at a time."""
    values = x[0].numel() * math.prod(layer.kernel)
    for rows in torch.split(x, max(1, BLOCK_VALUES // values)):
        yield layer_columns(rows, layer)


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
    """Return by weight name a random sample of the layer's input columns, float [d, columns]."""
    rows = sample_rows(client, max_examples, generator)
    samples = {layer.name: ColumnSample(max_columns, generator) for layer in layers}
    collect_layer_inputs(client, layers, samples, rows)
    return {name: sample.columns() for name, sample in samples.items()}


def sample_rows(client: Client, count: int, generator: torch.Generator) -> Tensor:
    """Return at most `count` of the client's rows, drawn without replacement."""
    index = client.data.index
    return index[torch.randperm(len(index), generator=generator)[:count].to(index.device)]


# ------------------------------------------------------------------------------------------------
# Core bases: the principal directions of a client's layer inputs outside protected subspaces.
# ------------------------------------------------------------------------------------------------

RankRule = Callable[[Tensor, float], int]
"""Returns the number of directions, given the singular values of the projected inputs and the
squared norm of the inputs."""


def threshold_at(task: int, first: float, increment: float) -> float:
    """Return the threshold of a task, which grows by `increment` per task, up to 1."""
    return min(1.0, first + increment * task)


def gpm_rule(threshold: float) -> RankRule:
    """Return GPM's rule: old and new directions together cover `threshold` of the squared norm."""
    return lambda singular, total: energy_rank(singular, threshold, total)


def mass_rule(threshold: float) -> RankRule:
    """Return the rule of FedProTIP's eq. 8: cover `threshold` of the sum of singular values."""
    return lambda singular, total: mass_rank(singular, threshold)


RANK_RULES = {"gpm": gpm_rule, "mass": mass_rule}
"""Rules that depend on a threshold, by name."""


def fixed_rule(rank: int) -> RankRule:
    """Return the rule that always chooses `rank` directions."""
    return lambda singular, total: rank


def capped(rule: RankRule, largest: int) -> RankRule:
    """Return the rule that chooses as `rule` does, but at most `largest` directions."""
    return lambda singular, total: min(rule(singular, total), largest)


@dataclass(frozen=True)
class PrincipalBasis:
    """Principal directions of a layer's inputs."""

    directions: Tensor
    """U: orthonormal columns, float [inputs, rank], in the order of their singular values."""
    singular: Tensor
    """Singular values, float [rank]."""

    def first(self, rank: int) -> PrincipalBasis:
        """Return the first `rank` directions."""
        return PrincipalBasis(self.directions[:, :rank], self.singular[:rank])


def principal_basis(inputs: Tensor, space: Subspace, rule: RankRule) -> PrincipalBasis:
    """Return the principal directions of inputs outside a subspace (eqs. 6 to 8).

    Args:
        inputs: Layer inputs as columns, float [inputs, n].
        space: Protected subspace, which is projected out.
        rule: Chooses the number of directions.

    """
    directions, singular = principal_directions(space.project_out_columns(inputs.double()))
    rank = rule(singular, float(inputs.double().square().sum()))
    basis = PrincipalBasis(directions.float().to(inputs), singular.float().to(inputs))
    return basis.first(rank)


def principal_bases(
    client: Client, layers: tuple[Layer, ...], inputs: Tensors, rule: RankRule
) -> dict[str, PrincipalBasis]:
    """Return by weight name the core basis of the layer's inputs outside the broadcast subspaces"""
    spaces: Subspaces = client.broadcast.get("spaces", {})
    return {
        layer.name: principal_basis(inputs[layer.name], layer_subspace(spaces, layer), rule)
        for layer in layers
    }


def bases_field(
    bases: Mapping[str, PrincipalBasis], sketch_size: int | None, generator: torch.Generator
) -> Sum | Each:
    """Return the upload field with a client's bases: U_k per client, or a sketch that is summed.

    The sketch is B_k = U_k diag(s_k) G_k (eq. 40). Here G_k = U_k^T G, which has the same
    distribution and makes B_k independent of the signs of U_k, which rounding can flip.
    """
    if sketch_size is None:
        return Each({name: basis.directions for name, basis in bases.items()})
    sketches = {}
    for name, basis in bases.items():
        scaled = (basis.directions * basis.singular) @ basis.directions.T
        sketches[name] = gaussian_sketch(scaled, sketch_size, generator)
    return Sum(sketches, 1.0)


def add_client_directions(
    spaces: Subspaces, layers: tuple[Layer, ...], uploads: CollectedUploads
) -> Subspaces:
    """Return the subspaces, with the union of the clients' directions of these layers added."""
    for layer in layers:
        new = united_directions(uploads, layer.name, layer.inputs)
        spaces = add_directions(spaces, layer, new)
    return spaces


def united_directions(uploads: CollectedUploads, name: str, inputs: int) -> Tensor:
    """Return the directions of one layer that all clients sent, side by side: [inputs, n]."""
    by_client = {client: value[name] for client, value in uploads.per_client["bases"].items()}
    for client, directions in by_client.items():
        check_columns(f"bases: {name!r} of client {client}", directions, inputs)
    return torch.cat(list(by_client.values()), dim=1)


def check_columns(where: str, columns: Tensor, inputs: int) -> None:
    """Refuse columns that are not vectors of a layer's input space."""
    if columns.dim() != 2 or len(columns) != inputs:
        refuse(where, f"shape {list(columns.shape)}", f"columns of {inputs} values")


def client_directions(uploads: CollectedUploads, layer: Layer, rule: RankRule) -> Tensor:
    """Return the directions of one layer that all clients sent, as columns.

    Of a summed sketch they are its principal directions; `rule` chooses their number among those
    that are not noise.
    """
    if "bases" in uploads.per_client:
        return united_directions(uploads, layer.name, layer.inputs)
    sketch = uploads.total("bases")[layer.name]
    spectrum = sketch_spectrum(sketch, uploads.noise.get("bases", 0.0))
    rank = rule(spectrum.singular, spectrum.energy)
    rank = min(rank, spectrum.rank) if "bases" in uploads.noise else rank
    return spectrum.directions[:, :rank].to(sketch)


def has_bases(uploads: CollectedUploads) -> bool:
    """Return whether any client sent bases of its layer inputs, as one or the other field."""
    return uploads.has("bases") or uploads.has("directions")


def warn_without_bases(
    uploads: CollectedUploads, layers: tuple[Layer, ...], context: Context
) -> None:
    """Log that no client sent any bases, if so."""
    if not has_bases(uploads):
        names = ", ".join(layer.name for layer in layers)
        warn_nothing_sent("fedprotip", context, f"nothing of the task is protected in {names}")


def mean_basis_bytes(uploads: CollectedUploads) -> float:
    """Return the mean number of bytes of the bases per client."""
    sums = [uploads.sums.get(name, {}) for name in ("bases", "directions")]
    by_client = [uploads.per_client.get(name, {}) for name in ("bases", "directions")]
    summed = sum(value.nbytes for values in sums for value in values.values())
    shown = [
        v.nbytes for clients in by_client for values in clients.values() for v in values.values()
    ]
    return float(summed) + sum(shown) / max(1, *(len(clients) for clients in by_client))
