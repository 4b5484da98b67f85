"""How the layer inputs of many clients become one basis: united, pooled or in sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from perdure.algebra.sketches import gaussian_sketch, sketch_spectrum
from perdure.algebra.subspaces import (
    Subspace,
    covering_rank,
    mass_rank,
    principal_directions,
    project_out_columns,
)
from perdure.contract.context import Client
from perdure.contract.uploads import CollectedUploads, Each, Sum
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts.bases import (
    RANK_RULES,
    PrincipalBasis,
    add_client_directions,
    check_columns,
    has_bases,
    principal_bases,
)
from perdure.methods.parts.protected_layers import Subspaces, add_directions, layer_subspace
from perdure.models.layers import Layer

# ------------------------------------------------------------------------------------------------
# Core bases of all clients' inputs together: as if their data lay in one place.
#
# A client describes a layer's inputs A (d x n) outside the protected subspace by its leading
# principal directions U and singular values s, with the energies |A|^2 and |A outside|^2. The
# server finds the principal directions of what all clients sent and takes as many as cover the
# threshold of the energy of all clients' inputs. Clients cut at 1 - (1 - threshold) / 4, so that
# little is missing from the joint decomposition; the energies are those before the cut.
# ------------------------------------------------------------------------------------------------

_CUT = 0.25
"""Fraction of the energy beyond the threshold that a client may leave out."""


@dataclass(frozen=True)
class InputDirections:
    """Principal directions of one client's layer inputs outside the protected subspace."""

    scaled: Tensor
    """double [d, r]: U diag(s)."""
    total: float
    """Energy |A|^2 of all inputs, protected or not."""
    outside: float
    """Energy of the inputs outside the protected subspace, before the cut."""

    def tree(self) -> Tensors:
        """Return it as tensors, which travel."""
        energies = torch.tensor([self.total, self.outside], dtype=torch.float64)
        return {"scaled": self.scaled.float(), "energies": energies}

    def symmetric_root(self) -> Tensor:
        """Return R = U diag(s) U^T: R R^T is the second moment, and no sign of U is in it."""
        lengths = self.scaled.norm(dim=0).clamp(min=1e-300)
        root: Tensor = self.scaled @ (self.scaled / lengths).T
        return root

    @classmethod
    def read(cls, tree: Tensors) -> InputDirections:
        """Return the inverse of `tree`."""
        total, outside = tree["energies"].tolist()
        return cls(tree["scaled"].double(), total, outside)


def input_directions(
    inputs: Tensor, subspace: Subspace, threshold: float, weight: float = 1.0
) -> InputDirections:
    """Return a client's leading input directions, cut where little is missing.

    Args:
        inputs: Float [d, n]: columns of layer inputs.
        subspace: The protected subspace.
        threshold: Fraction of the energy that the joint basis will cover.
        weight: Factor on the energies: columns that each of the n stands for.

    """
    outside = subspace.project_out_columns(inputs.double())
    directions, singular = principal_directions(outside)
    total, rest = float(inputs.double().square().sum()), float(outside.square().sum())
    rank = covering_rank(singular, 1 - _CUT * (1 - threshold), total, rest)
    scaled = directions[:, :rank] * singular[:rank]
    return InputDirections(scaled * weight**0.5, total * weight, rest * weight)


def pooled_directions(clients: list[InputDirections], threshold: float) -> Tensor:
    """Return the directions that cover the threshold of all clients' energy, double [d, r]."""
    directions, singular = principal_directions(
        torch.cat([client.scaled for client in clients], dim=1)
    )
    total, outside = sum(c.total for c in clients), sum(c.outside for c in clients)
    return directions[:, : covering_rank(singular, threshold, total, outside)]


def sequential_directions(clients: list[InputDirections], threshold: float) -> Tensor:
    """Return the directions that clients add one after another, double [d, r].

    Each covers the threshold of its own energy with the directions of the clients before it.
    """
    basis = clients[0].scaled[:, :0]
    for client in clients:
        rest = project_out_columns(client.scaled, basis)
        covered = float(client.scaled.square().sum() - rest.square().sum())
        directions, singular = principal_directions(rest)
        rank = covering_rank(singular, threshold, client.total, client.outside - covered)
        basis = torch.cat([basis, directions[:, :rank]], dim=1)
    return basis


def united_directions(clients: list[InputDirections]) -> Tensor:
    """Return the directions of all clients side by side: the union of their subspaces."""
    return torch.cat([principal_directions(client.scaled)[0] for client in clients], dim=1)


# ---- as fields of an upload

JOIN: dict[str, Callable[[list[InputDirections], float], Tensor]] = {
    "pooled": pooled_directions,
    "sequential": sequential_directions,
}
LARGEST_MOMENT = 1024
"""Inputs up to which a pooled layer travels as its second moment in a sum; beyond, as a sketch."""


def describe_inputs(
    client: Client, layers: tuple[Layer, ...], inputs: Tensors, threshold: float
) -> dict[str, InputDirections]:
    """Return by layer the directions of a client's inputs outside the broadcast `spaces`.

    Args:
        client: The client.
        layers: Protected layers.
        inputs: By layer columns [d, n], drawn from all of the client's.
        threshold: Fraction of the energy that the joint basis will cover.

    """
    spaces: Subspaces = client.broadcast.get("spaces", {})
    described = {}
    for layer in layers:
        columns = inputs[layer.name]
        weight = len(client.data) / columns.shape[1]
        subspace = layer_subspace(spaces, layer)
        described[layer.name] = input_directions(columns, subspace, threshold, weight)
    return described


def each_field(described: dict[str, InputDirections]) -> Each:
    """Return the directions as a field that the server sees client by client."""
    return Each(
        {f"{name}/{key}": v for name, d in described.items() for key, v in d.tree().items()}
    )


def summed_field(
    described: dict[str, InputDirections],
    sketch_size: int,
    generator: torch.Generator,
    largest_moment: int = LARGEST_MOMENT,
) -> Sum:
    """Return second moments or sketches, and energies, of which sums are enough.

    Clients cut nothing, so that the threshold is applied once, to the sum: use `describe_inputs`
    with a threshold of 1.
    """
    values: Tensors = {}
    for name, directions in described.items():
        if len(directions.scaled) > largest_moment:
            sketch = gaussian_sketch(directions.symmetric_root(), sketch_size, generator)
            values[f"{name}/sketch"] = sketch.float()
        else:
            values[f"{name}/moment"] = (directions.scaled @ directions.scaled.T).float()
        values[f"{name}/energies"] = directions.tree()["energies"]
    return Sum(values, 1.0)


def joined_directions(uploads: CollectedUploads, name: str, threshold: float, how: str) -> Tensor:
    """Return the directions of a layer that cover the threshold of all clients' inputs."""
    if "directions" in uploads.per_client:
        trees = [
            {key: value[f"{name}/{key}"] for key in ("scaled", "energies")}
            for value in uploads.per_client["directions"].values()
        ]
        return JOIN[how]([InputDirections.read(tree) for tree in trees], threshold)
    sums = uploads.total("directions")
    total, outside = sums[f"{name}/energies"].tolist()
    noise = uploads.noise.get("directions", 0.0)
    if noise:
        outside = min(max(outside, 0.0), total)
    directions, spectrum = summed_spectrum(sums, name, outside, noise)
    if how == "mass":
        return directions[:, : mass_rank(spectrum, threshold)]
    return directions[:, : covering_rank(spectrum, threshold, total, outside)]


def summed_spectrum(
    sums: Tensors, name: str, outside: float, noise: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the principal directions and singular values of what sums describe of a layer."""
    is_moment = f"{name}/moment" in sums
    matrix = sums[f"{name}/moment" if is_moment else f"{name}/sketch"].double()
    spectrum = sketch_spectrum(matrix, noise)
    energies = spectrum.singular if is_moment else spectrum.singular.square()
    total = energies.sum() if is_moment or not noise else energies.new_tensor(spectrum.energy)
    scaled = (energies * (outside / total.clamp(min=1e-300))).sqrt()
    count = spectrum.rank if noise else len(scaled)
    return spectrum.directions[:, :count], scaled[:count]


def add_joined_directions(
    spaces: Subspaces,
    layers: tuple[Layer, ...],
    uploads: CollectedUploads,
    threshold: float,
    how: str,
) -> Subspaces:
    """Return the spaces with the joint directions of these layers; see `joined_directions`."""
    for layer in layers:
        _check_directions(uploads, layer)
        new = joined_directions(uploads, layer.name, threshold, how)
        spaces = add_directions(spaces, layer, new)
    return spaces


def _check_directions(uploads: CollectedUploads, layer: Layer) -> None:
    """Refuse directions of a client that do not lie in a layer's input space."""
    for client, value in uploads.per_client.get("directions", {}).items():
        where = f"directions: {layer.name!r} of client {client}"
        check_columns(where, value[f"{layer.name}/scaled"], layer.inputs)


# ------------------------------------------------------------------------------------------------
# How the directions of many clients' layer inputs become one basis: union, pooled, sequential.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerBases:
    """What clients send of their layer inputs, and what the server makes of it."""

    join: Literal["union", "pooled", "sequential"]
    rank_rule: Literal["gpm", "mass"]
    sketch_size: int | None
    """Columns of a sketch. If None, the server sees each client's directions, else sums alone."""

    def describe(
        self,
        client: Client,
        layers: tuple[Layer, ...],
        inputs: Tensors,
        threshold: float,
        generator: Generator,
    ) -> tuple[Tree, dict[str, PrincipalBasis]]:
        """Return what a client sends: a field `directions`, or a basis of each layer for `bases`"""
        if self.sketch_size is not None:  # the server applies the threshold, once
            described = describe_inputs(client, layers, inputs, 1.0)
            largest = 0 if self.join == "union" else LARGEST_MOMENT
            field = summed_field(described, self.sketch_size, generator, largest)
            return {"directions": field}, {}
        if self.join == "union":
            rule = RANK_RULES[self.rank_rule](threshold)
            return {}, principal_bases(client, layers, inputs, rule)
        described = describe_inputs(client, layers, inputs, threshold)
        return {"directions": each_field(described)}, {}

    def extend(
        self,
        spaces: Subspaces,
        layers: tuple[Layer, ...],
        uploads: CollectedUploads,
        threshold: float,
    ) -> Subspaces:
        """Return the protected subspaces of the layers with the clients' directions added."""
        if not has_bases(uploads):
            return spaces
        if "directions" not in uploads.per_client | uploads.sums:
            return add_client_directions(spaces, layers, uploads)
        how = "mass" if self.rank_rule == "mass" else self.join
        return add_joined_directions(spaces, layers, uploads, threshold, how)
