"""Task identity prediction: which task's subspaces a feature lies in (FedProTIP, section 4.4).

U_t (feature size x r) is the block of directions that task t added to the space of final features;
blocks are orthogonal to each other. The relevance of task t to features A (n x d) is
||A U_t||_F / sqrt(n), which depends on A through its second moment A^T A / n alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.core.trees import Tensors


def block_list(blocks: Tensors) -> list[Tensor]:
    """Return the blocks in the order of their tasks."""
    return [blocks[key] for key in sorted(blocks, key=int)]


def relevance(features: Tensor, blocks: list[Tensor]) -> Tensor:
    """Return eq. 10 for each row alone: [n, tasks]."""
    return torch.stack([(features @ block).norm(dim=1) for block in blocks], dim=1)


def pooled(relevances: Tensor, batch: int) -> Tensor:
    """Return the relevance of each whole batch of rows, given to all of its rows: [n, tasks]."""
    parts = [
        part.square().mean(0).sqrt().expand_as(part) for part in torch.split(relevances, batch)
    ]
    return torch.cat(parts)


def moment_relevance(moment: Tensor, blocks: list[Tensor]) -> Tensor:
    """Return that of data with second moment M = A^T A / n: sqrt(tr(U_t^T M U_t)), [tasks]."""
    return torch.stack([((moment @ block) * block).sum().clamp(min=0).sqrt() for block in blocks])


def reference(moments: Tensors, blocks: list[Tensor]) -> Tensor:
    """Return the reference vectors omega^(tau) as rows: [tasks, tasks], 0 for tasks not seen."""
    like = blocks[0]
    result = like.new_zeros(len(blocks), len(blocks))
    for task, moment in moments.items():
        result[int(task)] = moment_relevance(moment, blocks)
    return result


def merged(old: Tensor | None, new: Tensor) -> Tensor:
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
    return torch.stack([merged(rows, empty.to(rows)) for rows in ordered])


def identify(relevances: Tensor, references: Tensor, drop_first: bool = False) -> Tensor:
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
