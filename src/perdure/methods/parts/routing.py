"""Task prediction of FedProTIP (section 4.4): which task's feature directions an example lies in.

U_t (feature size x r) is the block of directions that task t added to the space of final features;
blocks are orthogonal to each other. The relevance of task t to features A (n x d) is
||A U_t||_F / sqrt(n), which depends on A only through its second moment A^T A / n. The reference
vector of a task (eq. 10) is the relevance of all blocks to the task's training examples.

A client keeps the second moment of its final features of each task, from which the relevance of any
later block follows exactly; it stores no activation and sends no moment. Once the task's block is
known, clients send relevances: each client its own, or squares that are only summed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange
from perdure.contract.uploads import ClientResult, CollectedUploads, Each, Sum
from perdure.core.trees import Tensors


@dataclass(frozen=True)
class SecondMoments:
    """What a client keeps of its tasks."""

    moments: Tensors = field(default_factory=dict)
    """By task M [feature size, feature size]."""
    counts: dict[str, int] = field(default_factory=dict)
    """By task its number of examples."""

    def extended(self, client: Client, features: Tensor, strict: bool) -> SecondMoments:
        """Return the moments with those of a client's current task.

        Args:
            client: The client.
            features: Final features of the task's examples, as columns: [feature size, n].
            strict: Whether the moments of earlier tasks are forgotten.
        """
        task, old = str(client.context.task), {} if strict else self.moments
        moment = features @ features.T / features.shape[1]
        return SecondMoments(old | {task: moment}, self.counts | {task: len(client.data)})


# ---- relevance and references


def block_list(blocks: Tensors) -> list[Tensor]:
    """Return the blocks in the order of their tasks."""
    return [blocks[key] for key in sorted(blocks, key=int)]


def relevance(features: Tensor, blocks: list[Tensor]) -> Tensor:
    """Return eq. 10 for each row alone: [n, tasks]."""
    return torch.stack([(features @ block).norm(dim=1) for block in blocks], dim=1)


def pool_by_batch(relevances: Tensor, batch: int) -> Tensor:
    """Return the relevance of each whole batch of rows, given to all of its rows: [n, tasks]."""
    parts = [
        part.square().mean(0).sqrt().expand_as(part) for part in torch.split(relevances, batch)
    ]
    return torch.cat(parts)


def moment_relevance(moment: Tensor, blocks: list[Tensor]) -> Tensor:
    """Return that of data with second moment M = A^T A / n: sqrt(tr(U_t^T M U_t)), [tasks]."""
    return torch.stack([((moment @ block) * block).sum().clamp(min=0).sqrt() for block in blocks])


def reference_vectors(moments: Tensors, blocks: list[Tensor]) -> Tensor:
    """Return the reference vectors omega^(tau) as rows: [tasks, tasks], 0 for tasks not seen."""
    like = blocks[0]
    result = like.new_zeros(len(blocks), len(blocks))
    for task, moment in moments.items():
        result[int(task)] = moment_relevance(moment, blocks)
    return result


def update_references(old: Tensor | None, new: Tensor) -> Tensor:
    """Return new reference rows, and old ones (0 for later blocks) where there is no new row."""
    if old is None:
        return new
    before = new.new_zeros(new.shape)
    before[: len(old), : len(old)] = old
    return torch.where(new.abs().sum(1, keepdim=True) > 0, new, before)


def stacked(references: Tensors, tasks: int) -> Tensor:
    """Return all clients' references in one: [clients, tasks, tasks]."""
    empty = torch.zeros(tasks, tasks)
    ordered = [references[key] for key in sorted(references)]
    return torch.stack([update_references(rows, empty.to(rows)) for rows in ordered])


def predict_tasks(relevances: Tensor, references: Tensor, drop_first: bool = False) -> Tensor:
    """Return by eq. 11 and a vote the task of each row, int64 [n].

    Each client votes for the task whose reference has the largest cosine with the row's relevance;
    most votes win, ties go to the larger mean similarity. drop_first leaves the first block out, as
    the authors' code does.
    """
    seen = references.abs().sum(2) > 0
    if drop_first and relevances.shape[1] > 1:
        relevances, references = relevances[:, 1:], references[:, :, 1:]
    similarity = _similarity(relevances, references).masked_fill(~seen, -torch.inf)
    votes = torch.nn.functional.one_hot(similarity.argmax(2), references.shape[1]).sum(1)
    mean = similarity.masked_fill(~seen, 0).sum(1) / seen.sum(0).clamp(min=1)
    # Nearness is unbounded below where a cosine is not: squashed, it still only breaks ties.
    return (votes + 0.49 * torch.tanh(mean)).argmax(1)


def _similarity(relevances: Tensor, references: Tensor) -> Tensor:
    """Return cosines [n, clients, tasks]; with one block, where cosines say nothing, nearness."""
    if relevances.shape[1] == 1:
        return -(relevances[:, None] - references[None, :, :, 0]).abs()
    rows = torch.nn.functional.normalize(relevances, dim=1)
    return torch.einsum("nt,kst->nks", rows, torch.nn.functional.normalize(references, dim=2))


# ---- the exchange of references


def references_exchange(summed: bool) -> Exchange:
    """Return the exchange of references, of which the server sees each client's or only sums."""
    work = send_reference_sums if summed else send_references
    return Exchange("references", "all", send_blocks, work, store_references)


def send_blocks(server: Server, context: Context) -> dict[str, Tensors]:
    """Send the blocks of all tasks so far."""
    return {"blocks": server.state.blocks}


def send_references(client: Client) -> ClientResult:
    """Send omega_k^(tau) as rows, as a field that the server sees client by client."""
    return ClientResult({"references": Each({"rows": _rows(client)})})


def send_reference_sums(client: Client) -> ClientResult:
    """Send the squares of omega_k^(tau), to be averaged over the examples of all clients."""
    rows, kept = _rows(client), client.state
    counts = rows.new_zeros(len(rows))
    for task in kept.moments:
        counts[int(task)] = kept.counts[task]
    squares = rows.square() * counts.unsqueeze(1)
    return ClientResult({"references": Sum({"squares": squares, "counts": counts}, 1.0)})


def _rows(client: Client) -> Tensor:
    return reference_vectors(client.state.moments, block_list(client.broadcast["blocks"]))


def store_references(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Keep the references by client, or of all clients together where only sums came."""
    old = server.state.references
    if "references" in uploads.sums:
        sums = uploads.total("references")
        fresh = {"all": (sums["squares"] / sums["counts"].clamp(min=1).unsqueeze(1)).sqrt()}
    else:
        each = uploads.per_client.get("references", {})
        fresh = {str(client): value["rows"] for client, value in each.items()}
    merged = {name: update_references(old.get(name), rows) for name, rows in fresh.items()}
    return replace(server, state=replace(server.state, references=old | merged))
