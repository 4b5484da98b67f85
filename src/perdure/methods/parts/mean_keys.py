"""Keys in closed form, for prompts of which each belongs to a task.

The key of a task is the one with the largest mean cosine with the task's queries q_i,
    k = argmax sum_i cos(q_i, k) = s / |s|,   where   s = sum_i q_i / |q_i|,
over the examples of all clients: the minimum of the matching loss, which training approaches in
small steps. Queries are features of the backbone without prompts and never change, so one exchange
before training is enough, in which each client sends its part of the sum s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch.nn.functional import normalize

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.methods.parts.missing_statistics import warn_nothing_sent
from perdure.methods.parts.prompting import prompted_body
from perdure.models.forward_pass import ForwardPass
from perdure.models.prompts import KEYS

Keys = Literal["learned", "mean"]
"""learned: trained by the matching loss. mean: in closed form, and not trained."""


def opening_of_keys(keys: Keys) -> list[Exchange]:
    """Return the opening exchange that sets the task's key, if keys are means."""
    if keys == "learned":
        return []
    return [Exchange("keys", client_work=sum_queries, aggregate=set_key)]


def trained_with_keys(keys: Keys, context: Context) -> tuple[str, ...] | None:
    """Return the names that are trained: without the keys, if these are means; None for all."""
    if keys == "learned":
        return None
    return tuple(name for name in context.trainable if name != KEYS)


def sum_queries(client: Client) -> ClientResult:
    """Send the sum of the client's queries, each of length 1: float [width]."""
    network, directions = client.context.network, []
    for batch in client.data.batches():
        body = prompted_body(network.with_cached_features(batch.cached_features))
        queries = body.query(batch.x, ForwardPass()).double()
        directions.append(normalize(queries, dim=1).sum(0))
    total = torch.stack(directions).sum(0).float()
    return ClientResult({"queries": Sum({"total": total}, weight=1.0)})


def set_key(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Set the task's key; without any upload it stays as it was initialized."""
    if not uploads.has("queries"):
        warn_nothing_sent("keys", context, "the key of the task is a random one")
        return server
    keys = server.params[KEYS].clone()
    keys[context.task] = normalize(uploads.total("queries")["total"], dim=0).to(keys)
    return replace(server, params=server.params | {KEYS: keys})
