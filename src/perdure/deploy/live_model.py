"""The newest trained model of a run directory while it is served, and requests to it."""

from __future__ import annotations

import io
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from torch import Tensor

from perdure.core.documents import json_value
from perdure.core.errors import PerdureError, UserError
from perdure.data.images import fit_images
from perdure.deploy.model_files import load_model
from perdure.deploy.prediction_input import decode_image
from perdure.deploy.trained_model import TrainedModel

# ---- What a request may hold: one exact schema per model, and the sentence about any other body

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


# ---- The newest trained model of a run directory, which may be extended while it is served

log = logging.getLogger(__name__)

_CARD_KEYS = ("class_names", "shape", "dtype", "input", "features", "tasks_seen", "sha256")
Stamp = tuple[int, int, int]
"""Identifies a version of a file without reading it."""


class LiveModel:
    """Loads a model, and loads it again when its card has changed."""

    def __init__(
        self,
        run: Path,
        trust: bool = False,
        seconds: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load the model; UserError if there is none, or one that predicts numbers."""
        folder = run / "model" if (run / "model").is_dir() else run
        self._run, self._trust, self._path = run, trust, folder / "card.json"
        self._seconds, self._clock, self._stamp = seconds, clock, _stamp(self._path)
        self.model: TrainedModel = load_model(run, trust=trust)
        if self.model.numbers is not None:
            raise UserError(f"{run}: must be a run that predicts classes, got data.target 'number'")
        self.card = self._read_card()
        self._looked = clock()

    def newest(self) -> TrainedModel:
        """Return the newest model; the earlier one if the newest cannot be loaded."""
        now = self._clock()
        if now - self._looked >= self._seconds:
            self._looked = now
            stamp = _stamp(self._path)
            if stamp is not None and stamp != self._stamp:
                self._stamp = stamp
                self._load()
        return self.model

    def _load(self) -> None:
        try:
            model = load_model(self._run, trust=self._trust)
            if (model.shape, model.dtype) != (self.model.shape, self.model.dtype):
                raise UserError(f"{self._path}: describes a model of other inputs")
            self.card, self.model = self._read_card(), model
            log.info("%s: took up a model of %d tasks", self._run, model.last_task + 1)
        except (PerdureError, OSError) as error:
            self._stamp = None  # it may be complete the next time
            log.warning("%s; the earlier model is kept", error)

    def _read_card(self) -> dict[str, Any]:
        """Return what the card says about the model, without the paths of its config."""
        card = json_value(self._path.read_bytes())
        task_classes = card["outputs"]["task_classes"][: card["tasks_seen"]]
        known = {key: card.get(key) for key in _CARD_KEYS}
        texts = takes_texts(self.model)
        return known | {
            "task_classes": task_classes,
            "method": self.model.config.method["kind"],
            "texts": texts,
        }


def _stamp(path: Path) -> Stamp | None:
    """Return what changes when a file is replaced; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


# ---- Predictions of a live model, as documents of the HTTP interface

_QUICK = 0.01
"""Seconds: shorter predictions are made where they are asked for; longer ones in a thread, so that
other requests are answered meanwhile."""
_MOST_PIXELS = 25_000_000
ReadRows = Tensor | list[str]
"""Rows of a request: numbers, or texts."""


class Predictor:
    """Predicts with the newest model of a run."""

    def __init__(self, live: LiveModel) -> None:
        """Keep the model; how long a row takes is measured."""
        self.live, self._seconds_per_row = live, math.inf

    async def predict(self, rows: ReadRows, same_task: bool, probabilities: bool) -> dict[str, Any]:
        """Return the document of predictions; BadRequest if the rows do not fit the model."""
        arguments = self.live.newest(), rows, same_task, probabilities
        started = time.perf_counter()
        if self._seconds_per_row * len(rows) < _QUICK:
            document = describe(*arguments)
        else:
            document = await anyio.to_thread.run_sync(describe, *arguments)
        self._seconds_per_row = (time.perf_counter() - started) / len(rows)
        return document


def describe(
    model: TrainedModel, rows: ReadRows, same_task: bool, probabilities: bool
) -> dict[str, Any]:
    """Return the predictions of rows as a document."""
    try:
        found = model.predict(rows, details=True, same_task=same_task)
    except UserError as error:
        raise BadRequest(422, str(error)) from None
    if not all(math.isfinite(row.probability) for row in found):
        raise BadRequest(422, "inputs: must be numbers for which the model's outputs are finite")
    table = model.probabilities(rows, same_task=same_task).tolist() if probabilities else None
    document: dict[str, Any] = {
        "predictions": [
            {
                "label": row.label, "class": row.class_name, "probability": row.probability,
                "task": row.task, "margin": row.margin, "known": row.known,
            }
            for row in found
        ],
        "tasks_seen": model.last_task + 1,
    }  # fmt: skip
    return document if table is None else document | {"probabilities": table}


def image_rows(model: TrainedModel, data: bytes, fit: bool) -> tuple[Tensor, list[int] | None]:
    """Return an uploaded image as a row, and its size before it was resized."""
    try:
        pixels = decode_image(lambda: _open(data), "image", model)
    except UserError as error:
        raise BadRequest(422, str(error)) from None
    shape = tuple(pixels.shape[1:])
    if shape == model.shape:
        return pixels, None
    if not fit and not model.config.data.size:
        expected = f"of shape {model.shape}, or sent with fit=true"
        raise BadRequest(422, f"image: must be {expected}, got {shape}")
    return fit_images(pixels, model.shape), [shape[2], shape[1]]


def _open(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    if image.width * image.height > _MOST_PIXELS:
        raise BadRequest(413, f"image: must have at most {_MOST_PIXELS} pixels, got {image.size}")
    return image
