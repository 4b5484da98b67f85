"""How the directions of many clients' layer inputs become one basis: union, pooled, sequential."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Generator

from perdure.contract import Client, CollectedUploads
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts import pooled_bases
from perdure.methods.parts.bases import (
    RANK_RULES,
    PrincipalBasis,
    add_client_directions,
    has_bases,
    principal_bases,
)
from perdure.methods.parts.protected_layers import Subspaces
from perdure.models.layers import Layer


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
        """Return what a client sends: a field `directions`, or a basis of each layer for `bases`.

        Args:
            client: The client, with the broadcast field `spaces`.
            layers: The layers.
            inputs: By weight name layer inputs as columns.
            threshold: Fraction of the inputs that the joint basis will cover.
            generator: Source of the sketches' random matrices.
        """
        if self.sketch_size is not None:  # the server applies the threshold, once
            described = pooled_bases.describe_inputs(client, layers, inputs, 1.0)
            largest = 0 if self.join == "union" else pooled_bases.LARGEST_MOMENT
            field = pooled_bases.summed_field(described, self.sketch_size, generator, largest)
            return {"directions": field}, {}
        if self.join == "union":
            rule = RANK_RULES[self.rank_rule](threshold)
            return {}, principal_bases(client, layers, inputs, rule)
        described = pooled_bases.describe_inputs(client, layers, inputs, threshold)
        return {"directions": pooled_bases.each_field(described)}, {}

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
        return pooled_bases.add_joined_directions(spaces, layers, uploads, threshold, how)
