"""What a request may hold: one exact schema per model, and the sentence about any other body."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from torch import Tensor

from perdure.runs.trained_model import TrainedModel

_LARGEST = float(torch.finfo(torch.float32).max)
_MOST_LETTERS = 100_000
_TEXT = Annotated[str, Field(strict=True, max_length=_MOST_LETTERS)]
# JSON knows numbers only: 96.0 is an integer as well, which pydantic's strict int refuses
_PIXEL = Annotated[float, Field(strict=True, ge=0, le=255, multiple_of=1)]
_TOKEN = Annotated[float, Field(strict=True, ge=0, lt=2**31, multiple_of=1)]
_NUMBER = Annotated[float, Field(strict=True, ge=-_LARGEST, le=_LARGEST, allow_inf_nan=False)]
_VALUES: dict[torch.dtype, Any] = {
    torch.uint8: _PIXEL, torch.float32: _NUMBER, torch.int32: _TOKEN,
}  # fmt: skip


class BadRequest(Exception):
    """A request that cannot be answered, with the HTTP status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        """Keep both."""
        super().__init__(sentence)
        self.status = status


class PredictBody(BaseModel):
    """Body of a request for predictions; `request_model` adds `inputs`."""

    model_config = ConfigDict(extra="forbid", title="PredictRequest")

    same_task: Annotated[bool, Field(strict=True)] = False
    """All inputs are of one task."""
    probabilities: Annotated[bool, Field(strict=True)] = False
    """Whether to return the probabilities of all classes as well."""


def request_model(model: TrainedModel, max_rows: int) -> type[PredictBody]:
    """Return the class that reads a body for a model.

    `inputs` are 1 to `max_rows` rows of the model's shape (gray images also without their channel),
    or texts.
    """
    row: Any = _TEXT if takes_texts(model) else _rows(model)
    inputs: Any = Annotated[list[row], Field(min_length=1, max_length=max_rows, fail_fast=True)]
    return create_model("PredictRequest", __base__=PredictBody, inputs=(inputs, ...))


def takes_texts(model: TrainedModel) -> bool:
    """Return whether a model was trained on texts."""
    return model.dtype == torch.int32 or (len(model.shape) == 1 and model.dtype == torch.uint8)


def _rows(model: TrainedModel) -> Any:
    nested = _nested(model.shape, _VALUES[model.dtype])
    if len(model.shape) == 3 and model.shape[0] == 1:
        return nested | _nested(model.shape[1:], _VALUES[model.dtype])
    return nested


def _nested(shape: tuple[int, ...], value: Any) -> Any:
    for size in reversed(shape):
        value = Annotated[list[value], Field(min_length=size, max_length=size, fail_fast=True)]
    return value


def read_body(kind: type[PredictBody], body: bytes) -> PredictBody:
    """Return a body that fits; BadRequest 400 if it is no JSON, 422 if it does not fit."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first = max(reversed(found), key=lambda each: len(each["loc"]))  # of layouts the nearest
        if first["type"] == "json_invalid":
            raise BadRequest(400, f"body: must be JSON ({first['msg']})") from None
        where = ".".join(str(step) for step in first["loc"] if _is_place(step)) or "body"
        raise BadRequest(422, f"{where}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def _is_place(step: Any) -> bool:
    """Return whether a step of a location is a key or a position, not the name of a type."""
    return not (isinstance(step, str) and "[" in step)


def body_rows(model: TrainedModel, inputs: list[Any]) -> Tensor | list[str]:
    """Return the inputs of a body as `TrainedModel.predict` takes them."""
    if takes_texts(model):
        return inputs
    if len(model.shape) == 3 and model.shape[0] == 1:
        inputs = [row if isinstance(row[0][0], list) else [row] for row in inputs]
    return torch.tensor(inputs, dtype=model.dtype)
