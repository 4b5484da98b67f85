"""Networks of other libraries: one of tests-models if it is installed, and one of transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import perdure

ROOT = Path(__file__).resolve().parents[2]


def test_a_network_of_timm_learns_two_tasks(tmp_path: Path) -> None:
    """In a separate process: beside timm, transformers may fail to import torchvision."""
    folder = Path(sys.prefix) / "models"
    if not (folder / "timm").is_dir():
        pytest.skip(f"timm is not installed in {folder}; make test-models installs it")
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    words = ["-p", "no:cacheprovider", str(ROOT / "tests-models"), "-k", "timm and resnet18-fot"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_a_network_of_transformers_is_named_by_its_path() -> None:
    pytest.importorskip("transformers")
    config = {
        "kind": "transformers.ViTConfig", "image_size": 8, "patch_size": 4, "num_channels": 1,
        "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8,
        "num_labels": "auto",
    }  # fmt: skip
    values = {
        "data": {"source": "digits", "limit": 100},
        "stream": {"kind": "split", "tasks": 2},
        "clients": {"count": 2},
        "model": {"kind": "transformers.ViTForImageClassification", "config": config},
        "method": {"kind": "fedprotip"},
        "train": {"rounds": 1, "max_steps": 2},
        "engine": {"kind": "serial"},
    }
    result = perdure.run(values)
    assert result.values["rounds"] == 2
    assert all(0 <= value <= 1 for value in result.matrix["task_agnostic"][1])
