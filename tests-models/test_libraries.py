"""Networks of torchvision, timm and EfficientNet-Lite under the main methods: make test-models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure.config import read_yaml
from perdure.core.errors import UserError
from perdure.models.adapter.build import find_maker
from perdure.recipes import recipe_path

MODELS: dict[str, dict[str, Any]] = {
    "torchvision resnet18": {"kind": "torchvision.models.resnet18", "num_classes": "auto"},
    "timm resnet18": {
        "kind": "timm.create_model",
        "model_name": "resnet18",
        "num_classes": "auto",
    },
    "timm vit_tiny": {
        "kind": "timm.create_model",
        "model_name": "vit_tiny_patch16_224",
        "img_size": 32,
        "patch_size": 8,
        "num_classes": "auto",
    },
}
OPTIONS: dict[str, dict[str, Any]] = {"fot": {"sketch_ratio": 0.02}}
"""A sketch of the default size has 23,040 columns for a layer of resnet18 with 4,608 inputs."""
METHODS = ["fedavg", "fot", "fedprotip", "stamp", "special", "er", "ewc", "lwf"]


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of random images with 32x32 pixels and 4 classes."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "random.npz"
    x = {part: rng.integers(0, 256, (rows, 32, 32, 3), dtype=np.uint8)
         for part, rows in (("train", 48), ("test", 16))}  # fmt: skip
    np.savez(
        path, x_train=x["train"], y_train=np.arange(48) % 4, x_test=x["test"],
        y_test=np.arange(16) % 4,
    )  # fmt: skip
    return path


def config(images: Path, model: dict[str, Any], method: str) -> dict[str, Any]:
    return {
        "data": {"source": "npz", "path": str(images)},
        "stream": {"kind": "split", "tasks": 2},
        "clients": {"count": 2},
        "model": model,
        "method": {"kind": method, **OPTIONS.get(method, {})},
        "train": {"rounds": 1, "max_steps": 2, "batch_size": 8, "lr": 0.01},
        "engine": {"kind": "serial"},
    }


def skip_if_missing(kind: str) -> None:
    try:
        find_maker(kind)
    except UserError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", MODELS)
def test_two_tasks_of_one_round(images: Path, model: str, method: str) -> None:
    skip_if_missing(MODELS[model]["kind"])
    result = perdure.run(config(images, MODELS[model], method))
    assert result.values["rounds"] == 2
    assert all(0 <= value <= 1 for value in result.matrix["task_agnostic"][1])


@pytest.mark.parametrize("model", MODELS)
def test_clients_are_stacked(images: Path, model: str) -> None:
    """One round on the vector engine, which must not fall back to serial."""
    skip_if_missing(MODELS[model]["kind"])
    values = config(images, MODELS[model], "fedavg") | {"engine": {"kind": "vector"}}
    assert perdure.run(values).values["engine"] == "vector"


def test_the_pretrained_network_of_a_recipe(images: Path, tmp_path: Path) -> None:
    """One round of two tasks; the run finds the weights of the package again."""
    values = read_yaml(recipe_path("fedprotip-cifar100-efficientnet"))
    skip_if_missing(values["model"]["kind"])
    small = config(images, values["model"], "fedprotip") | {"method": values["method"]}
    small["data"] |= {"size": 64}
    result = perdure.run(small, out=tmp_path / "run")
    assert result.values["rounds"] == 2
    rows = np.zeros((3, 64, 64, 3), np.uint8)
    assert perdure.load(tmp_path / "run", trust=True).predict(rows).shape == (3,)
