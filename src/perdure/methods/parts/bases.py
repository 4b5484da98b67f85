"""Core bases: the principal directions of a client's layer inputs outside what is protected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.algebra.rank_rules import energy_rank, mass_rank
from perdure.algebra.sketches import gaussian_sketch
from perdure.algebra.subspaces import Subspace, principal_directions
from perdure.contract import Client, CollectedUploads, Each, Sum
from perdure.core.trees import Tensors
from perdure.methods.parts.protected_layers import Subspaces, add_directions, layer_subspace
from perdure.models.layers import Layer

RankRule = Callable[[Tensor, float], int]
"""Singular values of the projected inputs and the inputs' squared norm -> number of directions."""


def threshold_at(task: int, first: float, increment: float) -> float:
    """Return the threshold of a task: it grows with each task, up to 1."""
    return min(1.0, first + increment * task)


def gpm_rule(threshold: float) -> RankRule:
    """Return GPM's rule: old and new directions cover `threshold` of the squared norm."""
    return lambda singular, total: energy_rank(singular, threshold, total)


def mass_rule(threshold: float) -> RankRule:
    """Return FedProTIP's eq. 8: the new singular values are `threshold` of their sum."""
    return lambda singular, total: mass_rank(singular, threshold)


RANK_RULES = {"gpm": gpm_rule, "mass": mass_rule}


def fixed_rule(rank: int) -> RankRule:
    """Return the rule that always takes the same number of directions."""
    return lambda singular, total: rank


@dataclass(frozen=True)
class CoreBasis:
    """Directions U (d x r) with their singular values."""

    directions: Tensor
    singular: Tensor

    def first(self, rank: int) -> CoreBasis:
        """Return the leading directions."""
        return CoreBasis(self.directions[:, :rank], self.singular[:rank])


def core_basis(inputs: Tensor, space: Subspace, rule: RankRule) -> CoreBasis:
    """Eqs. 6 to 8: project the inputs away from the space, decompose, choose the rank."""
    directions, singular = principal_directions(space.project_out_columns(inputs.double()))
    rank = rule(singular, float(inputs.double().square().sum()))
    basis = CoreBasis(directions.float().to(inputs), singular.float().to(inputs))
    return basis.first(rank)


def core_bases(
    client: Client, layers: tuple[Layer, ...], inputs: Tensors, rule: RankRule
) -> dict[str, CoreBasis]:
    """Return the core basis of each layer's inputs outside the broadcast `spaces`."""
    spaces: Subspaces = client.broadcast.get("spaces", {})
    return {x.name: core_basis(inputs[x.name], layer_subspace(spaces, x), rule) for x in layers}


def bases_field(
    bases: Mapping[str, CoreBasis], sketch_size: int | None, generator: torch.Generator
) -> Sum | Each:
    """Return by layer U_k, which the server sees client by client; or a sketch that is summed.

    The sketch is eq. 40, B_k = U_k diag(s_k) G_k. G_k = U_k^T G has the same law, and B_k then no
    signs of U_k that rounding could turn.
    """
    if sketch_size is None:
        return Each({name: basis.directions for name, basis in bases.items()})
    sketches = {}
    for name, basis in bases.items():
        spread = (basis.directions * basis.singular) @ basis.directions.T
        sketches[name] = gaussian_sketch(spread, sketch_size, generator)
    return Sum(sketches, 1.0)


def add_client_directions(
    spaces: Subspaces, layers: tuple[Layer, ...], uploads: CollectedUploads, rule: RankRule
) -> Subspaces:
    """Return the spaces with the clients' directions of these layers added."""
    for layer in layers:
        spaces = add_directions(spaces, layer, client_directions(uploads, layer.name, rule))
    return spaces


def client_directions(uploads: CollectedUploads, name: str, rule: RankRule) -> Tensor:
    """Return a layer's directions of all clients side by side.

    Of a summed sketch they are its principal directions, as many as the rule takes.
    """
    if "bases" in uploads.per_client:
        return torch.cat([each[name] for each in uploads.per_client["bases"].values()], dim=1)
    sketch = uploads.total("bases")[name]
    directions, singular = principal_directions(sketch)
    rank = rule(singular, float(singular.square().sum()))
    return directions[:, :rank].to(sketch)


def mean_basis_bytes(uploads: CollectedUploads) -> float:
    """Return the bytes of the bases per client, on average."""
    if "bases" in uploads.sums:
        return float(sum(value.nbytes for value in uploads.sums["bases"].values()))
    each = uploads.per_client.get("bases", {})
    total = sum(value.nbytes for values in each.values() for value in values.values())
    return total / max(1, len(each))
