"""The `extensions` of a config: tasks that were added to a run after its start."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from perdure.config.base import ConfigSection, read_section
from perdure.config.domains import DomainConfig
from perdure.config.types import PositiveInt, Text
from perdure.core.errors import UserError

_ALLOWED = ("clients.count", "clients.dropout", "clients.partition", "clients.per_round", "train")
"""Keys, and sections with their keys, that may change in the middle of a run."""
_FIXED = ("train.outputs", "train.server_schedule", "train.weighting")
"""Keys in these sections that may not."""


class Extension(ConfigSection):
    """Tasks that were added to a run: more of its stream, or new data.

    Example: `extensions: [{tasks: 2}, {data: [{source: npz, path: may.npz}]}]`
    """

    tasks: PositiveInt | None = None
    """Number of further tasks of `stream`, which `stream.tasks` includes."""
    data: Annotated[list[DomainConfig], Field(min_length=1)] | None = None
    """New data, one source per task, with the keys of `data` and a `name`."""
    labels: Literal["shared", "separate"] = "shared"
    """New data: classes of a known name are the known ones, or all its classes are new."""
    settings: dict[str, Any] = Field(default={})
    """Settings of these tasks alone, such as `train.lr: 0.05`."""
    added: Text | None = None
    """When the tasks were added."""

    @property
    def count(self) -> int:
        """Number of tasks."""
        return len(self.data) if self.data is not None else self.tasks or 0

    def cut(self, count: int) -> Extension:
        """Return the extension with its first `count` tasks."""
        if self.data is None:
            return self.model_copy(update={"tasks": count})
        return self.model_copy(update={"data": self.data[:count]})

    @model_validator(mode="after")
    def _tasks_or_data(self) -> Extension:
        if (self.tasks is None) == (self.data is None):
            given = "both" if self.tasks is not None else "neither"
            raise ValueError(f"tasks: must be given, or data, got {given}")
        return self

    @model_validator(mode="after")
    def _settings_of_a_task(self) -> Extension:
        for key in self.settings:
            is_allowed = any(key == name or key.startswith(f"{name}.") for name in _ALLOWED)
            if not is_allowed or key in _FIXED:
                expected = "keys of train, or clients.count, per_round, dropout or partition"
                raise ValueError(f"settings: must be {expected}, got {key!r}")
        return self


def read_extension(values: dict[str, Any]) -> Extension:
    """Return a checked extension from plain values; UserError if a value is not valid."""
    try:
        return read_section(Extension, values, {})
    except ValueError as error:
        raise UserError(f"extensions.{error}") from None
