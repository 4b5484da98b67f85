"""Predictions over HTTP: the application around a trained model, its limits and its server."""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from perdure.core.errors import UserError
from perdure.core.version import __version__
from perdure.deploy.live_model import (
    BadRequest,
    LiveModel,
    Predictor,
    body_rows,
    image_rows,
    read_body,
    request_model,
)

# ---- A limit on the size of requests, which holds before anything is decoded

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class TooLarge(Exception):
    """A body with more bytes than allowed."""


class SizeLimit:
    """Answers 413 to requests whose body has more than `max_bytes` bytes, announced or not."""

    def __init__(self, app: App, max_bytes: int) -> None:
        """Wrap an application."""
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass a request on, while its body is not too large."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self.max_bytes:
            return await self._refuse(send)
        try:
            await self.app(scope, self._counted(receive), send)
        except TooLarge:
            await self._refuse(send)
        return None

    def _counted(self, receive: Receive) -> Receive:
        total = 0

        async def receive_counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.max_bytes:
                raise TooLarge
            return message

        return receive_counted

    async def _refuse(self, send: Send) -> None:
        detail = f"body: must be at most {self.max_bytes} bytes"
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        body = json.dumps({"detail": detail}).encode()
        await send({"type": "http.response.body", "body": body})


# ---- The HTTP interface of a trained model

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
    """Return the application."""
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


# ---- The server process: an application on a socket


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; UserError if it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)  # who connects before the server has started waits
    except OSError as error:
        bound.close()
        raise UserError(f"--host {host} --port {port}: cannot be used ({error.strerror})") from None
    return bound


def run_server(app: FastAPI, bound: socket.socket) -> None:
    """Answer requests until the process is asked to stop."""
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=30, limit_concurrency=1000)
    uvicorn.Server(config).run(sockets=[bound])
