"""Requests that are made from the OpenAPI page: none may be answered against it."""

from __future__ import annotations

import io
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from PIL import Image
from served import VALUES

import perdure

schemathesis = pytest.importorskip("schemathesis")
pytest.importorskip("uvicorn")

from perdure.deploy.live_model import LiveModel  # noqa: E402
from perdure.deploy.serve import make_app  # noqa: E402

pytestmark = pytest.mark.slow


def png(pixels: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.frombytes("L", (8, 8), pixels).save(buffer, "png")
    return buffer.getvalue()


# A schema cannot say which bytes are an image.
IMAGES = st.binary(min_size=64, max_size=64).map(png)
for kind in ("image/png", "image/jpeg", "image/webp", "image/bmp", "application/octet-stream"):
    schemathesis.openapi.media_type(kind, IMAGES)


@pytest.fixture(scope="module")
def app_schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = tmp_path_factory.mktemp("schema") / "run"
    perdure.run({**VALUES, "train": {"rounds": 1}}, out=run)
    return schemathesis.openapi.from_asgi("/openapi.json", make_app(LiveModel(run), max_rows=4))


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("path", ["/health", "/card", "/predict", "/predict/image"])
def test_every_answer_is_as_the_page_says(app_schema: Any, path: str, mode: Any) -> None:
    """Of valid requests, which are to be accepted, and of others, which are to be refused."""
    (operation,) = app_schema[path].values()
    cases = operation.as_strategy(generation_mode=mode)

    @settings(
        max_examples=40, derandomize=True, deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=cases)
    def check(case: Any) -> None:
        case.call_and_validate()

    with suppress(Unsatisfiable) if operation.method == "get" else nullcontext():
        check()  # without a body no request is invalid


def test_the_page_is_of_this_model(app_schema: Any) -> None:
    body = app_schema.raw_schema["paths"]["/predict"]["post"]["requestBody"]
    inputs = body["content"]["application/json"]["schema"]["properties"]["inputs"]
    assert (inputs["minItems"], inputs["maxItems"]) == (1, 4)
