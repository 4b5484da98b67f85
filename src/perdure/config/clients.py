"""The `clients` section of a config."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import model_validator

from perdure.config.base import ByKind, ConfigSection
from perdure.config.types import Fraction, PositiveFloat, PositiveInt, Probability

ROUNDING = 1e-9
"""0.7 of 10 clients is 7 of them, though the product is a little less."""


class IidPartition(ConfigSection):
    """Every client holds an equally large random sample of a task.

    Example: `partition: {kind: iid}`
    """

    kind: Literal["iid"] = "iid"
    """How each task's examples are divided among the clients: iid, dirichlet, shards or classes."""


class DirichletPartition(ConfigSection):
    """Each class is divided in proportions drawn from a Dirichlet distribution.

    Example: `partition: {kind: dirichlet, alpha: 0.5}`
    """

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: PositiveFloat = 0.5
    """Concentration of the Dirichlet distribution; small values make clients unequal."""


class ShardsPartition(ConfigSection):
    """Examples are sorted by label and cut into shards; each client holds some of them.

    Example: `partition: {kind: shards, per_client: 2}`
    """

    kind: Literal["shards"] = "shards"
    per_client: PositiveInt = 2
    """Shards per client."""


class ClassesPartition(ConfigSection):
    """Each client holds some of a task's classes.

    Example: `partition: {kind: classes, fraction: 0.6}`
    """

    kind: Literal["classes"] = "classes"
    fraction: Fraction = 0.6
    """Fraction of a task's classes that a client holds, rounded up: 0.6 is 6 of 10 and 2 of 2."""
    disjoint: bool = False
    """Divide the examples of a class among the clients that hold it. If false, each of them holds
    all."""


PartitionConfig = Annotated[
    IidPartition | DirichletPartition | ShardsPartition | ClassesPartition, ByKind()
]


class ClientsConfig(ConfigSection):
    """The clients of a run: how many there are, how many train per round, and what they hold.

    Example: `clients: {count: 100, per_round: 10, partition: {kind: dirichlet, alpha: 0.5}}`
    """

    count: PositiveInt = 10
    """Number of clients."""
    per_round: PositiveInt | None = None
    """Clients sampled per round among those with data of the task. If None, all of them."""
    partition: PartitionConfig = IidPartition()
    """How each task's examples are divided among the clients."""
    dropout: Probability = 0.0
    """Expected fraction of the sampled clients that never upload, in [0, 1)."""

    def max_dropouts(self, sampled: int) -> int:
        """Return how many of `sampled` clients may drop out of a round."""
        return math.ceil(self.dropout * sampled - ROUNDING)

    @model_validator(mode="after")
    def _no_more_than_exist(self) -> ClientsConfig:
        if self.per_round is not None and self.per_round > self.count:
            expected = f"1 to {self.count} (clients.count)"
            raise ValueError(f"per_round: must be {expected}, got {self.per_round}")
        return self
