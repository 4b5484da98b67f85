"""Reference vectors of tasks (FedProTIP, eq. 10): what clients keep, send and the server holds.

A client keeps the second moment M = A^T A / n of its final features of each task, from which its
relevance to any later block follows exactly; no activation is kept and no moment is sent. Once the
task's block is known, clients send relevances: each its own, or squares that are only summed.
"""

from __future__ import annotations

from torch import Tensor

from perdure.federation.messages import Each, Report, Sum, Upload
from perdure.methods.base import Client
from perdure.methods.parts import routing
from perdure.trees import Tree


def kept_moments(client: Client, features: Tensor, strict: bool) -> Tree:
    """What a client keeps after a task with these features (d x n); strict: of this task alone."""
    task = str(client.place.task)
    old = {} if strict else client.kept.get("moments", {})
    moment = features @ features.T / features.shape[1]
    counts = client.kept.get("counts", {}) | {task: len(client.shard)}
    return {"moments": {**old, task: moment}, "counts": counts}


def sent_references(client: Client, blocks: Tree, sums: bool) -> Upload:
    """omega_k^(tau) as rows; or their squares, to be averaged over all clients' examples."""
    rows = routing.reference(client.kept["moments"], routing.block_list(blocks))
    if not sums:
        return {"references": Each({"rows": rows})}
    counts = rows.new_zeros(len(rows))
    for task in client.kept["moments"]:
        counts[int(task)] = client.kept["counts"][task]
    squares = rows.square() * counts.unsqueeze(1)
    return {"references": Sum({"squares": squares, "counts": counts}, 1.0)}


def gathered_references(old: Tree, report: Report) -> Tree:
    """The references by client, or of all clients together where only sums came."""
    if "references" in report.totals:
        sums = report.total("references")
        fresh = {"all": (sums["squares"] / sums["counts"].clamp(min=1).unsqueeze(1)).sqrt()}
    else:
        fresh = {str(c): value["rows"] for c, value in report.each.get("references", {}).items()}
    return old | {name: routing.merged(old.get(name), rows) for name, rows in fresh.items()}
