"""Predictions of a live model, as documents of the HTTP interface."""

from __future__ import annotations

import io
import math
import time
from typing import Any

import anyio.to_thread
from PIL import Image
from torch import Tensor

from perdure.core.errors import UserError
from perdure.data.resize import fit_images
from perdure.runs.prediction_input import decode_image
from perdure.runs.trained_model import TrainedModel
from perdure.serving.live_model import LiveModel
from perdure.serving.requests import BadRequest

_QUICK = 0.01
"""Seconds: shorter predictions are made where they are asked for; longer ones in a thread, so that
other requests are answered meanwhile."""
_MOST_PIXELS = 25_000_000
Rows = Tensor | list[str]


class Predictor:
    """Predicts with the newest model of a run."""

    def __init__(self, live: LiveModel) -> None:
        """Keep the model; how long a row takes is measured."""
        self.live, self._seconds_per_row = live, math.inf

    async def predict(self, rows: Rows, same_task: bool, probabilities: bool) -> dict[str, Any]:
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
    model: TrainedModel, rows: Rows, same_task: bool, probabilities: bool
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
    """Return an uploaded image as a row, and its size before it was resized.

    Args:
        model: The model.
        data: A file of any format that Pillow reads.
        fit: Whether to resize the image, even if training data were not.
    """
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
