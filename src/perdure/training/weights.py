"""How much one client may count: weights from the sizes that clients announced, capped.

A node of a federation can announce any number of examples. It counts with at most
`federation.max_node_share` of the weight of the clients that are asked in an exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from perdure.algebra.robust import weight_cap
from perdure.config import Config
from perdure.contract.client_weights import WeightBounds, max_weight
from perdure.contract.context import Client, Context
from perdure.data.source import Array

if TYPE_CHECKING:
    from perdure.training.experiment import Experiment


def weight_bounds(
    experiment: Experiment, context: Context, clients: Sequence[int]
) -> WeightBounds | None:
    """Return the largest weights of the clients of an exchange.

    Args:
        experiment: The experiment, whose partitions have the sizes.
        context: The exchange.
        clients: Its participants.

    Returns:
        The bounds, or None in a simulation without secure sums, where nobody lies.
    """
    config, needs = experiment.config, experiment.needs
    if config.federation is None and not config.privacy.secagg:
        return None
    sizes = experiment.task(context.task).partition.sizes
    rows = {client: float(sizes[client]) for client in clients}
    cap = largest_size(config, list(rows.values()), int(np.count_nonzero(sizes)))
    return WeightBounds(cap, {c: max_weight(needs, min(n, cap)) for c, n in rows.items()})


def largest_size(config: Config, sizes: Sequence[float], nodes: int) -> float:
    """Return the number of examples beyond which a client's do not count.

    Args:
        config: The config. Without a federation section the number is infinite.
        sizes: Number of examples of every client that counts.
        nodes: Number of nodes with examples of the task, whether they count or not.
    """
    if config.federation is None:
        return math.inf
    share = config.federation.share_of(nodes)
    return math.inf if share is None else weight_cap(sizes, share)


def capped_sizes(config: Config, sizes: Array) -> Array:
    """Return how many examples of each client count, of all clients together: [clients]."""
    cap = largest_size(config, sizes.tolist(), int(np.count_nonzero(sizes)))
    return sizes if cap == math.inf else np.minimum(sizes, math.ceil(cap))


def with_cap(client: Client, cap: float) -> Client:
    """Return a client that counts with no more than `cap` examples."""
    if cap == math.inf:
        return client
    return replace(client, weight=min(client.weight, cap), weight_cap=cap)
