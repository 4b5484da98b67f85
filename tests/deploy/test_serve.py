"""perdure serve, asked by a real HTTP client."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from served import DIGITS, VALUES, served

import perdure
from perdure.data.images import fit_images

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "run"
    perdure.run(VALUES, out=path)
    return path


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[Any]:
    limits = ("--max-rows", "64", "--max-bytes", "200000")
    with served(run, *limits) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def test_predictions_are_those_of_predict(client: Any, run: Path) -> None:
    body = {"inputs": [*DIGITS[:20].tolist(), *DIGITS[20:, None].tolist()], "probabilities": True}
    reply = client.post("/predict", json=body)
    assert reply.status_code == 200, reply.text
    document, model = reply.json(), perdure.load(run)
    expected = model.predict(DIGITS, details=True)
    rows = document["predictions"]
    assert [row["label"] for row in rows] == [row.label for row in expected]
    assert [row["class"] for row in rows] == [row.class_name for row in expected]
    assert [row["task"] for row in rows] == [row.task for row in expected]
    for key in ("probability", "margin"):
        wanted = [getattr(row, key) for row in expected]
        assert [row[key] for row in rows] == pytest.approx(wanted, abs=1e-5)
    np.testing.assert_allclose(document["probabilities"], model.probabilities(DIGITS), atol=1e-5)
    assert document["tasks_seen"] == 2


def test_an_image_is_uploaded(client: Any, run: Path) -> None:
    expected = int(perdure.load(run).predict(DIGITS[3:4])[0])
    reply = client.post("/predict/image", content=png(DIGITS[3]))
    assert reply.status_code == 200, reply.text
    assert reply.json()["predictions"][0]["label"] == expected
    assert reply.json()["resized_from"] is None
    large = np.kron(DIGITS[3], np.ones((4, 4), dtype=np.uint8))
    refused = client.post("/predict/image", content=png(large))
    assert refused.status_code == 422
    assert "(1, 32, 32)" in refused.json()["detail"]
    fitted = client.post("/predict/image?fit=true", content=png(large)).json()
    assert fitted["resized_from"] == [32, 32]
    small = fit_images(torch.from_numpy(large)[None, None], (1, 8, 8))
    assert fitted["predictions"][0]["label"] == perdure.load(run).predict(small)[0]


def test_health_card_and_schema(client: Any, run: Path) -> None:
    saved = json.loads((run / "model" / "card.json").read_text())
    health = client.get("/health").json()
    assert health == {"status": "ok", "tasks_seen": 2, "sha256": saved["sha256"]}
    card = client.get("/card").json()
    assert card["class_names"] == saved["class_names"]
    assert card["shape"] == [1, 8, 8]
    assert "config" not in card
    schema = client.get("/openapi.json").json()
    assert set(schema["paths"]) == {"/health", "/card", "/predict", "/predict/image"}
    assert client.get("/docs").status_code == 200
    assert "perdure" in client.get("/").text


ROW = DIGITS[0].tolist()
BAD: list[tuple[str, Any, int, str]] = [
    ("/predict", b"{", 400, "JSON"),
    ("/predict", b"", 400, "JSON"),
    ("/predict", b"\xff\xfe", 400, "JSON"),
    ("/predict", {"inputs": []}, 422, "inputs"),
    ("/predict", {"inputs": [ROW] * 65}, 422, "64"),
    ("/predict", {"inputs": [ROW[:7]]}, 422, "inputs.0"),
    ("/predict", {"inputs": [[[300] * 8] * 8]}, 422, "255"),
    ("/predict", {"inputs": [[[0.5] * 8] * 8]}, 422, "multiple of 1"),
    ("/predict", {"inputs": [[[True] * 8] * 8]}, 422, "number"),
    ("/predict", {"inputs": ["seven"]}, 422, "array"),
    ("/predict", b'{"inputs": [[[NaN, 1]]]}', 422, "inputs.0"),
    ("/predict", {"input": [ROW]}, 422, "inputs"),
    ("/predict", {"inputs": [ROW], "more": 1}, 422, "more"),
    ("/predict", {"inputs": [ROW] * 2000}, 413, "200000 bytes"),
    ("/predict/image", b"no picture", 422, "image"),
    ("/predict/image", b"", 422, "image"),
    ("/predict/image", b"x" * 300_000, 413, "200000 bytes"),
    ("/predict/image?fit=perhaps", png(DIGITS[0]), 422, "fit"),
]


@pytest.mark.parametrize(("path", "body", "status", "part"), BAD, ids=lambda value: str(value)[:20])
def test_a_bad_request_gets_one_sentence(
    client: Any, path: str, body: Any, status: int, part: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = client.post(path, content=content)
    assert reply.status_code == status, reply.text
    assert list(reply.json()) == ["detail"]
    detail = reply.json()["detail"]
    assert part in detail
    assert "\n" not in detail
    assert client.get("/health").json()["status"] == "ok"


def test_a_body_that_does_not_say_its_size_is_cut_off(client: Any) -> None:
    reply = client.post("/predict", content=(b"[" * 10_000 for _ in range(50)))
    assert reply.status_code == 413
    assert client.get("/health").status_code == 200


@pytest.mark.slow
def test_a_small_file_that_is_a_huge_image(client: Any) -> None:
    buffer = io.BytesIO()
    Image.new("1", (8000, 8000)).save(buffer, "png")
    reply = client.post("/predict/image?fit=true", content=buffer.getvalue())
    assert reply.status_code == 413
    assert "pixels" in reply.json()["detail"]


@pytest.mark.slow
def test_a_new_task_is_taken_up_without_a_restart(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    stream = {**VALUES["stream"], "tasks": 3}
    perdure.run({**VALUES, "stream": stream}, out=tmp_path / "longer")
    with served(tmp_path / "run") as address, httpx.Client(base_url=address) as client:
        assert client.get("/health").json()["tasks_seen"] == 2
        folder = tmp_path / "run" / "model"
        (folder / "card.json").write_text("{")  # not complete: the earlier model is kept
        time.sleep(0.3)
        assert client.post("/predict", json={"inputs": [ROW]}).json()["tasks_seen"] == 2
        for name in ("model.safetensors", "card.json"):
            shutil.copy(tmp_path / "longer" / "model" / name, folder / name)
        time.sleep(0.3)
        document = client.post("/predict", json={"inputs": DIGITS.tolist()}).json()
        assert document["tasks_seen"] == 3
        expected = perdure.load(tmp_path / "longer").predict(DIGITS).tolist()
        assert [row["label"] for row in document["predictions"]] == expected
        assert len(client.get("/card").json()["task_classes"]) == 3


@pytest.mark.slow
def test_numbers_and_texts(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(60, 4))
    y = np.array(["low", "high"])[(x[:, 0] > 0).astype(int)]
    np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    values = {**VALUES, "method": {"kind": "fedavg"}, "stream": {"kind": "permuted", "tasks": 1}}
    data = {"source": "npz", "path": str(tmp_path / "x.npz")}
    perdure.run({**values, "data": data}, out=tmp_path / "numbers")
    with served(tmp_path / "numbers") as address, httpx.Client(base_url=address) as client:
        found = client.post("/predict", json={"inputs": x.tolist()}).json()["predictions"]
        expected = perdure.load(tmp_path / "numbers").predict(x)
        assert [row["label"] for row in found] == expected.tolist()
        assert found[0]["class"] in ("low", "high")
        for bad in (b"[[NaN,1,1,1]]", b"[[1e39,1,1,1]]", b"[[1,1,1]]"):
            reply = client.post("/predict", content=b'{"inputs": ' + bad + b"}")
            assert reply.status_code == 422, reply.text
        reply = client.post("/predict", json={"inputs": [[3e38] * 4]})
        assert reply.status_code in (200, 422)
        assert client.post("/predict/image", content=b"").status_code == 404
