"""Task prediction of FedProTIP (section 4.4): in which task's directions the features lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from torch import Generator, Tensor

from perdure.algebra.sketches import sketch_spectrum
from perdure.algebra.subspaces import Subspace, mass_rank
from perdure.config.section import UNQUOTED_OFF, Fixed, PositiveInt, Probability
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange
from perdure.contract.uploads import ClientResult, CollectedUploads, Each, Field, Sum
from perdure.core.errors import refuse
from perdure.core.trees import Tensors
from perdure.methods.parts.client_bases import ExtractsBases, PrincipalBasis, directions_of_all
from perdure.methods.parts.gaussian_router import GaussianRouter
from perdure.methods.parts.protected_layers import (
    FEATURES,
    Subspaces,
    feature_layer,
    layer_subspace,
)
from perdure.models.network import Network
from perdure.models.ops import ForwardPass

# ---- Blocks of feature directions, one per task (FedProTIP, section 4.4)
#
# U_t [feature size, r] are the directions that task t adds to the space of final features; blocks
# are orthogonal to each other. The number of tasks is not known: all blocks together get half of
# the feature space, and each task takes at most half of the directions that are left.


@dataclass(frozen=True)
class FeatureBlocks:
    """How a task's block of feature directions is found."""

    space_rank: int | Literal["threshold"]
    """Largest number of directions of a block, of which each client sends at least one; or
    threshold: as many as eq. 8 asks for."""
    sketch_size: int | None
    """Columns of a sketch. If None, the server sees each client's directions, else a sum alone."""

    def send(
        self, fields: dict[str, Field], client: Client, features: Tensor, threshold: float,
        generator: Generator,
    ) -> dict[str, Field]:  # fmt: skip
        """Return the fields, with the principal feature directions outside earlier blocks added.

        Args:
            fields: What the client sends of its layers.
            client: The client, with the broadcast field `feature_space`.
            features: Final features as columns, float [feature size, n].
            threshold: epsilon of eq. 8. If sketches are summed, the server applies it.
            generator: Of the sketch.

        """
        spaces = client.broadcast.get("feature_space", {})
        earlier = layer_subspace(spaces, feature_layer(client.context.network))
        basis, rank = PrincipalBasis.of(features, earlier), block_rank(earlier, self.space_rank)
        if self.space_rank != "threshold":
            rank = min(rank, max(1, rank // max(1, client.context.clients_with_data)))
        elif self.sketch_size is None:
            rank = min(mass_rank(basis.singular, threshold), rank)
        else:
            rank = earlier.size
        basis = basis.first(rank)
        if self.sketch_size is not None:
            sketch = basis.sketch(self.sketch_size, generator)
            return fields | {"bases": Sum({FEATURES: sketch}, 1.0)}
        of_layers = fields["bases"].value if "bases" in fields else {}
        return fields | {"bases": Each({**of_layers, FEATURES: basis.directions})}

    def with_task(
        self, blocks: Tensors, uploads: CollectedUploads, context: Context, threshold: float
    ) -> Tensors:
        """Return the blocks, with this task's block added: the union of the clients' directions.

        Without any upload it is a block without directions.
        """
        layer = feature_layer(context.network)
        if not uploads.has("bases"):
            return blocks | {str(context.task): torch.zeros(layer.inputs, 0)}
        earlier = layer_subspace(feature_space(blocks).get("feature_space", {}), layer)
        rank = block_rank(earlier, self.space_rank)
        by_threshold = self.space_rank == "threshold"
        if "bases" in uploads.per_client:
            found = directions_of_all(uploads, layer)
        else:
            found = summed_directions(uploads, rank, threshold if by_threshold else None)
        block = block_basis(earlier, found)
        return blocks | {str(context.task): block[:, :rank] if by_threshold else block}


def summed_directions(
    uploads: CollectedUploads, largest: int, threshold: float | None = None
) -> Tensor:
    """Return the principal directions of the summed sketches of features that are not noise.

    They are at most `largest`, and with a threshold as many as eq. 8 asks for.
    """
    sketch = uploads.total("bases")[FEATURES]
    spectrum, rank = sketch_spectrum(sketch, uploads.noise.get("bases", 0.0)), largest
    if threshold is not None:
        rank = min(mass_rank(spectrum.singular, threshold), rank)
    rank = min(rank, spectrum.rank) if "bases" in uploads.noise else rank
    return spectrum.directions[:, :rank].to(sketch)


def feature_space(blocks: Tensors) -> dict[str, Subspaces]:
    """Return the broadcast field with the feature directions of all blocks, if there are any."""
    if not blocks:
        return {}
    return {"feature_space": {FEATURES: {"basis": torch.cat(block_list(blocks), dim=1)}}}


def block_list(blocks: Tensors) -> list[Tensor]:
    """Return the blocks in the order of their tasks."""
    return [blocks[key] for key in sorted(blocks, key=int)]


def block_rank(earlier: Subspace, space_rank: int | Literal["threshold"]) -> int:
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
    """Return how many directions are left of the half of the space that all blocks get."""
    return max(0, earlier.size // 2 - earlier.rank)


# ---- Task prediction of FedProTIP (section 4.4): which task's feature directions an example
# lies in
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


@dataclass(frozen=True)
class ReferenceRouter:
    """The router of the paper: the task whose reference is nearest to a row's relevance."""

    summed: bool
    """Whether the server sees only sums of references over clients."""
    batch: int | None
    """If given, consecutive batches of so many rows are of one task each."""
    drop_first: bool
    """Whether to leave out the first block, as in the authors' code."""

    def exchange(self) -> Exchange:
        """Return the exchange of references, with all clients that ever held a task."""
        return Exchange("references", "ever", self.send_blocks, self.send, self.store)

    def send_blocks(self, server: Server, context: Context) -> dict[str, Tensors]:
        """Send the blocks of all tasks so far."""
        return {"blocks": server.state.blocks}

    def send(self, client: Client) -> ClientResult:
        """Send omega_k^(tau) as rows; or their squares, to be averaged over all examples."""
        if not (self.summed or client.state.moments):
            return ClientResult()
        rows = reference_vectors(client.state.moments, block_list(client.broadcast["blocks"]))
        if not self.summed:
            return ClientResult({"references": Each({"rows": rows})})
        counts = rows.new_zeros(len(rows))
        for task in client.state.moments:
            counts[int(task)] = client.state.counts[task]
        squares = rows.square() * counts.unsqueeze(1)
        return ClientResult({"references": Sum({"squares": squares, "counts": counts}, 1.0)})

    def store(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        """Store the references per client, or of all clients together if only sums were sent."""
        old, tasks = server.state.references, len(server.state.blocks)
        if "references" in uploads.sums:
            sums = uploads.total("references")
            new = {"all": (sums["squares"] / sums["counts"].clamp(min=1).unsqueeze(1)).sqrt()}
        else:
            sent = uploads.per_client.get("references", {})
            new = {str(client): value["rows"] for client, value in sent.items()}
            for client, rows in new.items():
                if list(rows.shape) != [tasks, tasks]:
                    where = f"references of client {client}"
                    refuse(where, f"shape {list(rows.shape)}", f"of shape {[tasks, tasks]}")
        updated = {name: update_references(old.get(name), rows) for name, rows in new.items()}
        return replace(server, state=replace(server.state, references=old | updated))

    def task_scores(self, server: Server, x: Tensor, network: Network) -> Tensor | None:
        """Return the votes of the clients' references for each task; None before there are any."""
        references, blocks = server.state.references, block_list(server.state.blocks)
        if not references:
            return None
        features = network.features(server.params, x, ForwardPass(buffers=server.buffers))
        relevances = relevance(features, blocks)
        if self.batch is not None:
            relevances = pool_by_batch(relevances, self.batch)
        stacked = stack_references(references, len(blocks))
        return task_scores(relevances, stacked, self.drop_first)


# ---- The keys that choose how tasks are predicted


@dataclass(frozen=True)
class PredictsTasks(ExtractsBases):
    """A method that predicts the task of an example."""

    routing: Annotated[Literal["sample", "batch", "off"], UNQUOTED_OFF] = "sample"
    """How the task of a test example is predicted: from the example alone (sample), from its batch,
    which must be of one task (batch), or not at all (off, the paper's -t)."""
    router: Literal["references", "gaussian"] = "references"
    """references: the nearest pattern of relevances (the paper). gaussian: the largest density of
    Gaussian classes, from sums over features (not in the paper)."""
    router_layers: Annotated[PositiveInt, Fixed()] = 2
    """Layers that the Gaussian router sees: 1 for the final features alone, 2 also the inputs of
    the body's last layer (averaged over positions), and so on; never the examples themselves."""
    unknown: Annotated[Probability, Fixed()] = 0.0
    """With `router: gaussian`, the fraction of a Gaussian class's examples that may be taken for
    examples of no known task: those that lie farther from the mean. Then `route` returns -1, and
    the prediction is among the outputs of all tasks so far. 0: every example has a task."""
    routing_batch: Annotated[PositiveInt, Fixed()] = 64
    """Examples per batch with `routing: batch`."""
    space_rank: Annotated[PositiveInt | Literal["threshold"], Fixed()] = 20
    """Maximum number of feature directions that a task adds, unless there are more clients; or
    threshold, as many as eq. 8 asks for. At most half of those that are left."""
    drop_first: bool = False
    """Leave the first block out of the relevance vectors, as the authors' code does."""
    references: Literal["moments", "strict"] = "moments"
    """moments: exact for later blocks. strict: nothing is kept of old tasks, and their relevance to
    later blocks counts as zero."""
    pool_references: bool = False
    """Have one reference per task, of all clients' features together, instead of a vote of the
    clients. Always so with `transport: sketch`."""

    @property
    def task_router(self) -> ReferenceRouter | GaussianRouter | None:
        """What predicts tasks, if anything does."""
        batch = self.routing_batch if self.routing == "batch" else None
        if self.routing == "off":
            return None
        if self.router == "gaussian":
            return GaussianRouter(self.router_layers, batch, self.unknown)
        summed = self.pool_references or self.transport == "sketch"
        return ReferenceRouter(summed, batch, self.drop_first)

    @property
    def feature_blocks(self) -> FeatureBlocks | None:
        """How blocks of feature directions are found, if they distinguish tasks."""
        if self.routing == "off" or self.router != "references":
            return None
        sketch_size = self.sketch_size if self.transport == "sketch" else None
        return FeatureBlocks(self.space_rank, sketch_size)

    def check_config(self, config: Any) -> str | None:
        """Refuse routing where a task is not one distribution."""
        if self.routing != "off" and not config.stream.distinct_tasks:
            return f"method.routing: must be off on a pool stream, got {self.routing!r}"
        return super().check_config(config)

    def route(
        self, server: Server, x: Tensor, network: Network, client_state: Any = None
    ) -> Tensor | None:
        """Return how well each row fits each task by the router (eqs. 10, 11)."""
        router = self.task_router
        return None if router is None else router.task_scores(server, x, network)

    def for_mixed_rows(self) -> PredictsTasks:
        """Return the method with the task of each row predicted from the row alone."""
        return replace(self, routing="sample") if self.routing == "batch" else self
