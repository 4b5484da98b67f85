"""Task prediction of FedProTIP (section 4.4): in which task's directions the features lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from perdure.algebra.subspaces import Subspace
from perdure.contract.checks import refuse
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange
from perdure.contract.uploads import ClientResult, CollectedUploads, Each, Sum
from perdure.core.trees import Tensors
from perdure.methods.parts.bases import (
    PrincipalBasis,
    capped,
    client_directions,
    fixed_rule,
    mass_rule,
    principal_basis,
)
from perdure.methods.parts.closed_form import ClassGaussians
from perdure.methods.parts.gaussian_router import task_means
from perdure.methods.parts.protected_layers import (
    FEATURES,
    Subspaces,
    feature_layer,
    layer_subspace,
)
from perdure.models.network import Outputs

# ------------------------------------------------------------------------------------------------
# Tasks that a router may not tell apart: the same inputs with other labels.
# ------------------------------------------------------------------------------------------------

_CLOSEST = 0.1
"""Distance of two tasks' means, relative to the spread of classes, below which they are alike."""


def alike_warnings(gaussians: Tensors, outputs: Outputs) -> dict[str, str]:
    """Return a warning if the features of two of the tasks so far are hardly different."""
    if not gaussians:
        return {}
    classes = ClassGaussians.read(gaussians)
    spread = classes.shared_covariance().trace().sqrt().clamp(min=1e-12)
    pair = alike_tasks(task_means(classes, outputs) / spread, _CLOSEST)
    if pair is None:
        return {}
    return {
        "alike": f"fedprotip: the features of task {pair[1] + 1} are hardly different from those "
        f"of task {pair[0] + 1}; tasks with the same inputs and other labels cannot be "
        "distinguished"
    }


def alike_tasks(descriptions: Tensor, closest: float) -> tuple[int, int] | None:
    """Return the first two tasks that are nearer to each other than `closest`, or None.

    Args:
        descriptions: float [tasks, D].
        closest: A distance.

    """
    for task in range(1, len(descriptions)):
        distances = (descriptions[:task] - descriptions[task]).norm(dim=1)
        if float(distances.min()) < closest:
            return int(distances.argmin()), task
    return None


# ------------------------------------------------------------------------------------------------
# Task prediction of FedProTIP (section 4.4): which task's feature directions an example lies in.
#
# U_t (feature size x r) is the block of directions that task t added to the space of final
# features; blocks are orthogonal to each other. The relevance of task t to features A (n x d) is
# ||A U_t||_F / sqrt(n), which depends on A only through its second moment A^T A / n. The reference
# vector of a task (eq. 10) is the relevance of all blocks to the task's training examples.
#
# A client keeps the second moment of its final features of each task, from which the relevance of
# any later block follows exactly; it stores no activation and sends no moment. Once the task's
# block is known, all clients that ever held a task send relevances of all their tasks to all blocks
# (Alg. 1, line 13): each client its own, or squares that are only summed. A sum of squares is what
# the second moments of all clients' features together give.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SecondMoments:
    """Client state: second moments of the final features of each task."""

    moments: Tensors = field(default_factory=dict)
    """By task (its index as a string) A^T A / n, float [feature size, feature size]."""
    counts: dict[str, int] = field(default_factory=dict)
    """By task its number of examples."""

    def with_task(self, client: Client, features: Tensor, strict: bool) -> SecondMoments:
        """Return the moments, with those of a client's current task added.

        Args:
            client: The client.
            features: Final features of the task's examples, as columns: [feature size, n].
            strict: Whether the moments of earlier tasks are dropped.

        """
        task, old = str(client.context.task), {} if strict else self.moments
        moment = features @ features.T / features.shape[1]
        return SecondMoments(old | {task: moment}, self.counts | {task: len(client.data)})


# ---- relevance and references


def block_list(blocks: Tensors) -> list[Tensor]:
    """Return the blocks in the order of their tasks."""
    return [blocks[key] for key in sorted(blocks, key=int)]


def relevance(features: Tensor, blocks: list[Tensor]) -> Tensor:
    """Return the relevance of each task to each row (eq. 10), float [n, tasks].

    Args:
        features: float [n, feature size].
        blocks: Feature directions of each task, [feature size, r].

    """
    return torch.stack([(features @ block).norm(dim=1) for block in blocks], dim=1)


def pool_by_batch(relevances: Tensor, batch: int) -> Tensor:
    """Return the relevances of batches of rows, repeated for each row, float [n, tasks]."""
    batches = torch.split(relevances, batch)
    return torch.cat([rows.square().mean(0).sqrt().expand_as(rows) for rows in batches])


def moment_relevance(moment: Tensor, blocks: list[Tensor]) -> Tensor:
    """Return the relevances for a second moment M = A^T A / n: sqrt(tr(U_t^T M U_t)), [tasks]."""
    return torch.stack([((moment @ block) * block).sum().clamp(min=0).sqrt() for block in blocks])


def reference_vectors(moments: Tensors, blocks: list[Tensor]) -> Tensor:
    """Return the reference vectors omega^(tau) as rows, [tasks, tasks]; 0 without a moment."""
    rows = blocks[0].new_zeros(len(blocks), len(blocks))
    for task, moment in moments.items():
        rows[int(task)] = moment_relevance(moment, blocks)
    return rows


def update_references(old: Tensor | None, new: Tensor) -> Tensor:
    """Return the new reference rows; a row of zeros is replaced by the old row, if there is one.

    Args:
        old: float [old tasks, old tasks], or None. Later blocks count as 0.
        new: float [tasks, tasks].

    """
    if old is None:
        return new
    padded = new.new_zeros(new.shape)
    padded[: len(old), : len(old)] = old
    return torch.where(new.abs().sum(1, keepdim=True) > 0, new, padded)


def stack_references(references: Tensors, tasks: int) -> Tensor:
    """Return all clients' references as one tensor, float [clients, tasks, tasks]."""
    empty = torch.zeros(tasks, tasks)
    ordered = [references[key] for key in sorted(references)]
    return torch.stack([update_references(rows, empty.to(rows)) for rows in ordered])


def score_features(
    features: Tensor, blocks: Tensors, references: Tensors, batch: int | None, drop_first: bool
) -> Tensor:
    """Return how well each row fits each task, float [n, tasks].

    Args:
        features: float [n, feature size].
        blocks: By task its feature directions.
        references: By client, or under `all` for sums, its references.
        batch: If given, consecutive batches of so many rows are of one task each.
        drop_first: Whether to leave out the first block, as in the authors' code.

    """
    relevances = relevance(features, block_list(blocks))
    if batch is not None:
        relevances = pool_by_batch(relevances, batch)
    return task_scores(relevances, stack_references(references, len(blocks)), drop_first)


def task_scores(relevances: Tensor, references: Tensor, drop_first: bool = False) -> Tensor:
    """Return each task's votes of the clients (eq. 11), plus less than half a vote: [n, tasks].

    Each client votes for the task whose reference has the largest cosine with the row's relevance.
    The mean similarity decides between tasks with equally many votes.

    Args:
        relevances: float [n, tasks].
        references: float [clients, tasks, tasks].
        drop_first: Whether to leave out the first block, as in the authors' code.

    """
    seen = references.abs().sum(2) > 0
    if drop_first and relevances.shape[1] > 1:
        relevances, references = relevances[:, 1:], references[:, :, 1:]
    similarity = _similarity(relevances, references).masked_fill(~seen, -torch.inf)
    votes = torch.nn.functional.one_hot(similarity.argmax(2), references.shape[1]).sum(1)
    mean = similarity.masked_fill(~seen, 0).sum(1) / seen.sum(0).clamp(min=1)
    # tanh bounds the similarity (a negative distance is unbounded), so that it only breaks ties
    return votes + 0.49 * torch.tanh(mean)


def _similarity(relevances: Tensor, references: Tensor) -> Tensor:
    """Return cosines, or negative distances if there is only one block: [n, clients, tasks]."""
    if relevances.shape[1] == 1:
        return -(relevances[:, None] - references[None, :, :, 0]).abs()
    rows = torch.nn.functional.normalize(relevances, dim=1)
    return torch.einsum("nt,kst->nks", rows, torch.nn.functional.normalize(references, dim=2))


# ---- the exchange of references


def references_exchange(summed: bool) -> Exchange:
    """Return the exchange of references; if `summed`, the server sees only sums over clients."""
    client_work = send_reference_sums if summed else send_references
    return Exchange("references", "ever", send_blocks, client_work, store_references)


def send_blocks(server: Server, context: Context) -> dict[str, Tensors]:
    """Send the blocks of all tasks so far."""
    return {"blocks": server.state.blocks}


def send_references(client: Client) -> ClientResult:
    """Send the client's references omega_k^(tau) as rows, which the server sees per client."""
    if not client.state.moments:
        return ClientResult()
    return ClientResult({"references": Each({"rows": _reference_rows(client)})})


def send_reference_sums(client: Client) -> ClientResult:
    """Send the squares of omega_k^(tau), to be averaged over the examples of all clients."""
    rows, state = _reference_rows(client), client.state
    counts = rows.new_zeros(len(rows))
    for task in state.moments:
        counts[int(task)] = state.counts[task]
    squares = rows.square() * counts.unsqueeze(1)
    return ClientResult({"references": Sum({"squares": squares, "counts": counts}, 1.0)})


def _reference_rows(client: Client) -> Tensor:
    return reference_vectors(client.state.moments, block_list(client.broadcast["blocks"]))


def store_references(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Store the references per client, or of all clients together if only sums were sent."""
    old = server.state.references
    if "references" in uploads.sums:
        sums = uploads.total("references")
        new = {"all": (sums["squares"] / sums["counts"].clamp(min=1).unsqueeze(1)).sqrt()}
    else:
        per_client = uploads.per_client.get("references", {})
        _check_references(per_client, len(server.state.blocks))
        new = {str(client): value["rows"] for client, value in per_client.items()}
    updated = {name: update_references(old.get(name), rows) for name, rows in new.items()}
    return replace(server, state=replace(server.state, references=old | updated))


def _check_references(per_client: dict[int, Tensors], tasks: int) -> None:
    """Refuse references that do not have one row and one column per task."""
    for client, value in per_client.items():
        shape = list(value["rows"].shape)
        if shape != [tasks, tasks]:
            where = f"references of client {client}"
            refuse(where, f"shape {shape}", f"of shape {[tasks, tasks]}")


# ------------------------------------------------------------------------------------------------
# Blocks of feature directions, one per task (FedProTIP, section 4.4).
#
# U_t [feature size, r] are the directions that task t adds to the space of final features; blocks
# are orthogonal to each other. The number of tasks is not known: all blocks together get half of
# the feature space, and each task takes at most half of the directions that are left.
# ------------------------------------------------------------------------------------------------

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
