"""Blocks of feature directions, one per task (FedProTIP, section 4.4).

U_t [feature size, r] are the directions that task t adds to the space of final features; blocks are
orthogonal to each other. Nobody knows how many tasks will come: all blocks share half of the
feature space, and a task takes at most half of what is left of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.algebra.subspaces import Subspace
from perdure.contract import Client, CollectedUploads, Context
from perdure.core.trees import Tensors
from perdure.methods.parts.bases import CoreBasis, client_directions, core_basis, fixed_rule
from perdure.methods.parts.protected_layers import (
    FEATURES,
    Subspaces,
    feature_layer,
    layer_subspace,
)
from perdure.methods.parts.routing import block_list


def feature_space_field(blocks: Tensors) -> dict[str, Subspaces]:
    """Return the broadcast field that names the feature directions of all blocks so far."""
    if not blocks:
        return {}
    return {"feature_space": {FEATURES: {"basis": torch.cat(block_list(blocks), dim=1)}}}


def feature_basis(client: Client, features: Tensor, most: int) -> CoreBasis:
    """Return a client's principal feature directions outside of earlier blocks.

    Args:
        client: The client, with the broadcast field `feature_space`.
        features: Final features as columns.
        most: The largest number of directions of all clients together; each gives at least one.
    """
    taken = layer_subspace(
        client.broadcast.get("feature_space", {}), feature_layer(client.context.network)
    )
    rank = block_rank(taken, most)
    own = min(rank, max(1, rank // max(1, client.context.clients_with_data)))
    return core_basis(features, taken, fixed_rule(own))


def add_block(blocks: Tensors, uploads: CollectedUploads, context: Context, most: int) -> Tensors:
    """Return the blocks with that of this task: the union of the clients' feature directions."""
    sent = feature_space_field(blocks).get("feature_space", {})
    taken = layer_subspace(sent, feature_layer(context.network))
    rule = fixed_rule(block_rank(taken, most))
    block = block_basis(taken, client_directions(uploads, FEATURES, rule))
    return blocks | {str(context.task): block}


def block_rank(taken: Subspace, most: int) -> int:
    """Return the number of directions of a block, at most `most`; 0 if nothing is left."""
    return min(most, -(-_left(taken) // 2))


def block_basis(taken: Subspace, candidates: Tensor) -> Tensor:
    """Return an orthonormal basis of what the candidates span beyond the directions taken.

    Where that is more than is left for blocks, it is cut to what most candidates share.
    """
    _, block = taken.extended(candidates)
    return block[:, : _left(taken)]


def _left(taken: Subspace) -> int:
    return max(0, taken.size // 2 - taken.rank)
