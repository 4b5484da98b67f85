"""Reference vectors of tasks (FedProTIP, eq. 10): what clients keep, send and the server holds.

A client keeps the second moment M = A^T A / n of its final features of each task, from which its
relevance to any later block follows exactly; no activation is kept and no moment is sent. Once the
task's block is known, clients send relevances: each its own, or squares that are only summed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from perdure.contract import (
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    Each,
    Exchange,
    Server,
    Sum,
)
from perdure.core.trees import Tensors
from perdure.methods.parts import routing


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


def references_exchange(summed: bool) -> Exchange:
    """Return the exchange of references, of which the server sees each client's or only sums."""
    work = sum_references if summed else show_references
    return Exchange("references", "all", send_blocks, work, gather_references)


def send_blocks(server: Server, context: Context) -> dict[str, Tensors]:
    """Send the blocks of all tasks so far."""
    return {"blocks": server.state.blocks}


def show_references(client: Client) -> ClientResult:
    """Send omega_k^(tau) as rows, as a field that the server sees client by client."""
    return ClientResult({"references": Each({"rows": _rows(client)})})


def sum_references(client: Client) -> ClientResult:
    """Send the squares of omega_k^(tau), to be averaged over the examples of all clients."""
    rows, kept = _rows(client), client.state
    counts = rows.new_zeros(len(rows))
    for task in kept.moments:
        counts[int(task)] = kept.counts[task]
    squares = rows.square() * counts.unsqueeze(1)
    return ClientResult({"references": Sum({"squares": squares, "counts": counts}, 1.0)})


def _rows(client: Client) -> Tensor:
    return routing.reference(client.state.moments, routing.block_list(client.broadcast["blocks"]))


def gather_references(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Keep the references by client, or of all clients together where only sums came."""
    old = server.state.references
    if "references" in uploads.sums:
        sums = uploads.total("references")
        fresh = {"all": (sums["squares"] / sums["counts"].clamp(min=1).unsqueeze(1)).sqrt()}
    else:
        each = uploads.per_client.get("references", {})
        fresh = {str(client): value["rows"] for client, value in each.items()}
    merged = {name: routing.merged(old.get(name), rows) for name, rows in fresh.items()}
    return replace(server, state=replace(server.state, references=old | merged))
