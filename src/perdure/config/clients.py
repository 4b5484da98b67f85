"""The `clients` section of a config."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from pydantic import Field, SerializeAsAny, ValidationInfo, field_serializer, model_validator
from pydantic_core import PydanticCustomError

from perdure.config.section import (
    ChosenByKind,
    ConfigSection,
    KindSection,
    PositiveInt,
    Probability,
    read_kind,
)

ROUNDING = 1e-9
"""0.7 of 10 clients is 7 of them, though the product is a little less."""


class PartitionConfig(KindSection):
    """How each task's examples are divided among the clients. A kind is a subclass with its keys.

    A registry names the kind: `PARTITIONS` of perdure.data.partition_kinds, an entry point, or the
    dotted path of the class.
    """

    registry_path: ClassVar[str] = "perdure.data.partition_kinds:PARTITIONS"

    kind: str = ""
    """How each task's examples are divided among the clients: iid, dirichlet, shards or classes;
    or column or folder, if the data says who holds what."""

    is_natural: ClassVar[bool] = False
    """Whether the data says who the clients are."""
    in_folders: ClassVar[bool] = False
    """Whether every client has a folder of images."""
    needs_classes: ClassVar[bool] = False
    """Whether rows are divided by their classes, so that numbers cannot be."""

    @property
    def column(self) -> str | None:
        """The column that names the client of a row. None if there is none."""
        return None

    def fewest_rows(self, clients: int) -> int:
        """Return the rows that a task must have to be divided among this many clients."""
        return clients

    def divide(self, task: Any, rng: Any) -> Any:
        """Return who holds which rows, a `perdure.data.partition.Partition`.

        Args:
            task: A `perdure.data.partition.TaskRows`: rows, labels and the clients that see them.
            rng: numpy generator of all draws, the same for the same seed and task.

        """
        raise NotImplementedError


class ClientsConfig(ConfigSection):
    """The clients of a run: how many there are, how many train per round, and what they hold.

    Example: `clients: {count: 100, per_round: 10, partition: {kind: dirichlet, alpha: 0.5}}`
    """

    count: PositiveInt = 10
    """Number of clients. With a partition by column or folder it is that of the data, and must be
    null, omitted or equal."""
    per_round: PositiveInt | None = None
    """Clients sampled per round among those with data of the task. If None, all of them."""
    partition: Annotated[SerializeAsAny[PartitionConfig], ChosenByKind()] = Field(
        default_factory=PartitionConfig.default
    )
    """How each task's examples are divided among the clients."""
    dropout: Probability = 0.0
    """Expected fraction of the sampled clients that never upload, in [0, 1)."""

    def max_dropouts(self, sampled: int) -> int:
        """Return how many of `sampled` clients may drop out of a round."""
        return math.ceil(self.dropout * sampled - ROUNDING)

    @property
    def is_counted(self) -> bool:
        """Whether the number of clients is known without reading the data."""
        return not self.partition.is_natural or "count" in self.model_fields_set

    @field_serializer("count")
    def _null_if_not_counted(self, count: int) -> int | None:
        """Write null if the data gives the number, so that it is not taken for a choice."""
        return count if self.is_counted else None

    @model_validator(mode="before")
    @classmethod
    def _counted_in_the_data(cls, values: Any, info: ValidationInfo) -> Any:
        """Drop `count: null` beside a natural partition."""
        if not isinstance(values, dict) or values.get("count", 0) is not None:
            return values
        section = values.get("partition", {})
        try:
            if not isinstance(section, PartitionConfig):
                section = read_kind(PartitionConfig, section, info.context)
        except (ValueError, PydanticCustomError):  # it is said when the key itself is read
            return values
        if not (isinstance(section, PartitionConfig) and section.is_natural):
            return values
        return {key: value for key, value in values.items() if key != "count"}

    @model_validator(mode="after")
    def _no_more_than_exist(self) -> ClientsConfig:
        if self.is_counted and self.per_round is not None and self.per_round > self.count:
            expected = f"1 to {self.count} (clients.count)"
            raise ValueError(f"per_round: must be {expected}, got {self.per_round}")
        return self
