"""The HTTP interface of a trained model."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from perdure.core.version import __version__
from perdure.serving.limits import SizeLimit
from perdure.serving.live_model import LiveModel
from perdure.serving.predictor import Predictor, image_rows
from perdure.serving.requests import BadRequest, body_rows, read_body, request_model

PAGE = Path(__file__).with_name("page.html")
_ABOUT = "Predictions of a trained model, without a task label."
_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/bmp", "application/octet-stream")


class Problem(BaseModel):
    """One sentence about a request that cannot be answered."""

    detail: str


class Health(BaseModel):
    """The state of the server."""

    status: str
    tasks_seen: int
    sha256: str


class Row(BaseModel):
    """The prediction of one input."""

    model_config = ConfigDict(populate_by_name=True)

    label: int
    class_name: Annotated[str, Field(alias="class")]
    probability: float
    task: int | None
    margin: float | None
    known: bool


class Predictions(BaseModel):
    """The predictions of all inputs of a request."""

    predictions: list[Row]
    tasks_seen: int
    probabilities: list[list[float]] | None = None


class ImagePrediction(Predictions):
    """The prediction of an image."""

    resized_from: list[int] | None


def _problems(*codes: int) -> dict[int | str, dict[str, Any]]:
    return {code: {"model": Problem} for code in codes}


def make_app(live: LiveModel, max_rows: int = 256, max_bytes: int = 8_000_000) -> FastAPI:
    """Return the application.

    Args:
        live: The model.
        max_rows: Most inputs of one request.
        max_bytes: Most bytes of the body of one request.
    """
    app = FastAPI(title="perdure", version=__version__, description=_ABOUT)
    app.add_middleware(SizeLimit, max_bytes=max_bytes)
    app.add_exception_handler(RequestValidationError, _bad_query)
    predictor, kind = Predictor(live), request_model(live.model, max_rows)
    body = {"application/json": {"schema": kind.model_json_schema()}}

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> str:
        return PAGE.read_text(encoding="utf-8")

    @app.get("/health")
    async def health() -> Health:
        """Return whether the server answers, and which model it has."""
        tasks = live.newest().last_task + 1
        return Health(status="ok", tasks_seen=tasks, sha256=live.card["sha256"])

    @app.get("/card")
    async def card() -> dict[str, Any]:
        """Return what the model takes and predicts: classes, shape, type and tasks."""
        live.newest()
        return live.card

    @app.post(
        "/predict",
        response_model=Predictions,
        responses=_problems(400, 413, 422),
        openapi_extra={"requestBody": {"required": True, "content": body}},
    )
    @answered
    async def predict(request: Request) -> dict[str, Any]:
        """Predict the class of every input, without a task label."""
        read = read_body(kind, await request.body())
        rows = body_rows(live.model, read.inputs)  # type: ignore[attr-defined]
        return await predictor.predict(rows, read.same_task, read.probabilities)

    if len(live.model.shape) == 3:
        binary = {"schema": {"type": "string", "format": "binary"}}
        content = dict.fromkeys(_IMAGES, binary)

        @app.post(
            "/predict/image",
            response_model=ImagePrediction,
            responses=_problems(413, 422),
            openapi_extra={"requestBody": {"required": True, "content": content}},
        )
        @answered
        async def predict_image(
            request: Request,
            fit: Annotated[bool, Query(description="Resize it to the model's size.")] = False,
        ) -> dict[str, Any]:
            """Predict the class of an image, which is the body of the request."""
            rows, resized_from = image_rows(live.newest(), await request.body(), fit)
            document = await predictor.predict(rows, False, True)
            return document | {"resized_from": resized_from}

    return app


def answered(
    function: Callable[..., Awaitable[dict[str, Any]]],
) -> Callable[..., Awaitable[Response]]:
    """Return a function that answers with its document, or with the sentence of a bad request."""

    @wraps(function)
    async def answer(*args: Any, **kwargs: Any) -> Response:
        try:
            document = await function(*args, **kwargs)
        except BadRequest as error:
            return JSONResponse({"detail": str(error)}, error.status)
        return Response(json.dumps(document), media_type="application/json")

    return answer


async def _bad_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"])
    return JSONResponse({"detail": f"{where}: {first['msg'].lower()}"}, 422)
