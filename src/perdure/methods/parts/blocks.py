"""Blocks of feature directions, one per task (FedProTIP, section 4.4).

U_t [feature size, r] are the directions that task t adds to the space of final features; blocks are
orthogonal to each other. The number of tasks is not known: all blocks together get half of the
feature space, and each task takes at most half of the directions that are left.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from perdure.algebra.subspaces import Subspace
from perdure.contract import Client, CollectedUploads, Context
from perdure.core.trees import Tensors
from perdure.methods.parts.bases import (
    PrincipalBasis,
    capped,
    client_directions,
    fixed_rule,
    mass_rule,
    principal_basis,
)
from perdure.methods.parts.protected_layers import (
    FEATURES,
    Subspaces,
    feature_layer,
    layer_subspace,
)
from perdure.methods.parts.routing import block_list

SpaceRank = int | Literal["threshold"]
"""Directions of a block: their largest number, or as many as eq. 8 asks for."""


def feature_space_field(blocks: Tensors) -> dict[str, Subspaces]:
    """Return the broadcast field with the feature directions of all blocks, if there are any."""
    if not blocks:
        return {}
    return {"feature_space": {FEATURES: {"basis": torch.cat(block_list(blocks), dim=1)}}}


def feature_basis(
    client: Client, features: Tensor, space_rank: SpaceRank, threshold: float, summed: bool
) -> PrincipalBasis:
    """Return a client's principal feature directions outside earlier blocks.

    Args:
        client: The client, with the broadcast field `feature_space`.
        features: Final features as columns, float [feature size, n].
        space_rank: Largest number of directions of all clients together, of which each sends at
            least one; or threshold: each sends as many as eq. 8 asks for.
        threshold: epsilon of eq. 8.
        summed: Whether the server sees a sum alone. Then it applies the threshold, and clients
            leave out nothing.
    """
    feature_space = client.broadcast.get("feature_space", {})
    earlier = layer_subspace(feature_space, feature_layer(client.context.network))
    rank = block_rank(earlier, space_rank)
    if space_rank != "threshold":
        rank = min(rank, max(1, rank // max(1, client.context.clients_with_data)))
        return principal_basis(features, earlier, fixed_rule(rank))
    rule = fixed_rule(earlier.size) if summed else capped(mass_rule(threshold), rank)
    return principal_basis(features, earlier, rule)


def add_block(
    blocks: Tensors,
    uploads: CollectedUploads,
    context: Context,
    space_rank: SpaceRank,
    threshold: float,
) -> Tensors:
    """Return the blocks, with this task's block added: the union of the clients' directions.

    Without any upload it is a block without directions.

    Args:
        blocks: Blocks by task (its index as a string).
        uploads: Uploads with the field `bases`.
        context: Position in the run.
        space_rank: Largest number of directions of a block; or threshold.
        threshold: epsilon of eq. 8.
    """
    if not uploads.has("bases"):
        return blocks | {str(context.task): torch.zeros(context.network.feature_size, 0)}
    feature_space = feature_space_field(blocks).get("feature_space", {})
    layer = feature_layer(context.network)
    earlier = layer_subspace(feature_space, layer)
    rank = block_rank(earlier, space_rank)
    by_threshold = space_rank == "threshold"
    rule = capped(mass_rule(threshold), rank) if by_threshold else fixed_rule(rank)
    block = block_basis(earlier, client_directions(uploads, layer, rule))
    return blocks | {str(context.task): block[:, :rank] if by_threshold else block}


def block_rank(earlier: Subspace, space_rank: SpaceRank) -> int:
    """Return the largest number of directions of a new block, given the span of earlier blocks."""
    half = -(-_free_rank(earlier) // 2)
    return half if space_rank == "threshold" else min(space_rank, half)


def block_basis(earlier: Subspace, candidates: Tensor) -> Tensor:
    """Return an orthonormal basis of the span of the candidates outside earlier blocks.

    If it has more directions than are left, only those that most candidates share are returned.
    """
    _, block = earlier.extended(candidates)
    return block[:, : _free_rank(earlier)]


def _free_rank(earlier: Subspace) -> int:
    return max(0, earlier.size // 2 - earlier.rank)
