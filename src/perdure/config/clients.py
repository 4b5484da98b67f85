"""The `clients` section of a config."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import field_serializer, model_validator

from perdure.config.section import (
    ByKind,
    ConfigSection,
    Fraction,
    PositiveFloat,
    PositiveInt,
    Probability,
    Text,
)

ROUNDING = 1e-9
"""0.7 of 10 clients is 7 of them, though the product is a little less."""


class IidPartition(ConfigSection):
    """Every client holds an equally large random sample of a task.

    Example: `partition: {kind: iid}`
    """

    kind: Literal["iid"] = "iid"
    """How each task's examples are divided among the clients: iid, dirichlet, shards or classes;
    or column or folder, if the data says who holds what."""


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


class ColumnPartition(ConfigSection):
    """The data names the client of every row, such as the hospital of a patient.

    Example: `partition: {kind: column, name: hospital}`
    """

    kind: Literal["column"] = "column"
    name: Text = "client"
    """Column of a table or Hugging Face data set, field of JSON lines, or array of an npz file."""


class FolderPartition(ConfigSection):
    """Every client has a folder: client/class/image, or client/domain/class/image.

    Example: `partition: {kind: folder}`
    """

    kind: Literal["folder"] = "folder"


NaturalPartition = ColumnPartition | FolderPartition
"""Partitions in which the data says who the clients are."""
PartitionConfig = Annotated[
    IidPartition
    | DirichletPartition
    | ShardsPartition
    | ClassesPartition
    | ColumnPartition
    | FolderPartition,
    ByKind(),
]


class ClientsConfig(ConfigSection):
    """The clients of a run: how many there are, how many train per round, and what they hold.

    Example: `clients: {count: 100, per_round: 10, partition: {kind: dirichlet, alpha: 0.5}}`
    """

    count: PositiveInt = 10
    """Number of clients. With a partition by column or folder it is that of the data, and must be
    null, omitted or equal."""
    per_round: PositiveInt | None = None
    """Clients sampled per round among those with data of the task. If None, all of them."""
    partition: PartitionConfig = IidPartition()
    """How each task's examples are divided among the clients."""
    dropout: Probability = 0.0
    """Expected fraction of the sampled clients that never upload, in [0, 1)."""

    def max_dropouts(self, sampled: int) -> int:
        """Return how many of `sampled` clients may drop out of a round."""
        return math.ceil(self.dropout * sampled - ROUNDING)

    @property
    def is_counted(self) -> bool:
        """Whether the number of clients is known without reading the data."""
        is_natural = isinstance(self.partition, NaturalPartition)
        return not is_natural or "count" in self.model_fields_set

    @field_serializer("count")
    def _null_if_not_counted(self, count: int) -> int | None:
        """Write null if the data gives the number, so that it is not taken for a choice."""
        return count if self.is_counted else None

    @model_validator(mode="before")
    @classmethod
    def _counted_in_the_data(cls, values: Any) -> Any:
        """Drop `count: null` beside a natural partition."""
        if not isinstance(values, dict) or values.get("count", 0) is not None:
            return values
        partition = values.get("partition")
        kind = partition.get("kind") if isinstance(partition, dict) else partition
        if kind not in ("column", "folder") and not isinstance(kind, NaturalPartition):
            return values
        return {key: value for key, value in values.items() if key != "count"}

    @model_validator(mode="after")
    def _no_more_than_exist(self) -> ClientsConfig:
        if self.is_counted and self.per_round is not None and self.per_round > self.count:
            expected = f"1 to {self.count} (clients.count)"
            raise ValueError(f"per_round: must be {expected}, got {self.per_round}")
        return self
