"""The card of a trained model, read from a file that anybody may have changed."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_MAX_CLASSES = 1_000_000
_MAX_VALUES = 100_000_000
"""Values per input."""

Label = Annotated[int, Field(ge=0, lt=_MAX_CLASSES)]
Size = Annotated[int, Field(ge=1, le=_MAX_VALUES)]
Name = Annotated[str, Field(max_length=10_000)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class OutputsCard(_Part):
    """Outputs of the head."""

    kind: Literal["shared", "growing"]
    task_classes: list[list[Label]] = Field(min_length=1)
    known_classes: list[Label] | None


class NumbersCard(_Part):
    """Scale of numbers to predict."""

    mean: float
    std: float


class BackboneCard(_Part):
    """Pretrained weights of a backbone."""

    name: Name
    kind: Name
    config: dict[str, Any]
    sha256: Name


class ModelCard(_Part):
    """The content of card.json that prediction needs."""

    config: dict[str, Any]
    shape: list[Size] = Field(min_length=1, max_length=3)
    class_names: list[Name] = Field(max_length=_MAX_CLASSES)
    outputs: OutputsCard
    tasks_seen: Annotated[int, Field(ge=1)]
    backbone: BackboneCard | None
    code: dict[str, str]
    dtype: Literal["uint8", "float32", "int32"]
    features: list[Name] | None
    numbers: NumbersCard | None

    @model_validator(mode="after")
    def _check_sizes(self) -> ModelCard:
        groups = self.outputs.task_classes
        known = self.outputs.known_classes
        if math.prod(self.shape) > _MAX_VALUES:
            raise ValueError(f"shape: must have at most {_MAX_VALUES} values")
        if self.tasks_seen > len(groups):
            raise ValueError(f"tasks_seen is {self.tasks_seen} of {len(groups)} tasks")
        if any(label >= len(self.class_names) for group in groups for label in group):
            raise ValueError("outputs.task_classes: must be labels of class_names")
        if any(len(set(group)) < len(group) for group in groups):
            raise ValueError("outputs.task_classes: must be different in each task")
        if known and (len(known) < self.tasks_seen or max(known) > len(self.class_names)):
            raise ValueError("outputs.known_classes: must be counts of class_names, one per task")
        return self


def read_card(values: dict[str, Any]) -> ModelCard:
    """Return a checked card.

    Raises:
        ValueError: A key is missing or has another type; the text names it.
    """
    try:
        return ModelCard.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else str(first["msg"])) from None
