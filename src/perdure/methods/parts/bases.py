"""Core bases: the principal directions of a client's layer inputs outside protected subspaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.algebra.sketches import gaussian_sketch, sketch_spectrum
from perdure.algebra.subspaces import Subspace, energy_rank, mass_rank, principal_directions
from perdure.contract.checks import refuse
from perdure.contract.context import Client, Context
from perdure.contract.uploads import CollectedUploads, Each, Sum
from perdure.core.trees import Tensors
from perdure.methods.parts.protected_layers import (
    Subspaces,
    add_directions,
    layer_subspace,
    warn_nothing_protected,
)
from perdure.models.layers import Layer

# ------------------------------------------------------------------------------------------------
# Core bases: the principal directions of a client's layer inputs outside protected subspaces.
# ------------------------------------------------------------------------------------------------

RankRule = Callable[[Tensor, float], int]
"""Returns the number of directions, given the singular values of the projected inputs and the
squared norm of the inputs."""


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
        warn_nothing_protected("fedprotip", context, layers)


def mean_basis_bytes(uploads: CollectedUploads) -> float:
    """Return the mean number of bytes of the bases per client."""
    sums = [uploads.sums.get(name, {}) for name in ("bases", "directions")]
    by_client = [uploads.per_client.get(name, {}) for name in ("bases", "directions")]
    summed = sum(value.nbytes for values in sums for value in values.values())
    shown = [
        v.nbytes for clients in by_client for values in clients.values() for v in values.values()
    ]
    return float(summed) + sum(shown) / max(1, *(len(clients) for clients in by_client))
