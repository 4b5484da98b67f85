"""Prompt methods on a text encoder: both engines, prediction, and a backbone that was exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import perdure
from backbone_files import write_bert, write_reviews
from perdure.config import parse
from perdure.errors import UserError
from perdure.federation.experiment import prepare
from perdure.federation.loop import run_stream
from perdure.models.checkpoints import file_hash

pytest.importorskip("tokenizers")
LAYERS = {"general_layers": [0], "expert_layers": [1, 2]}


def config(folder: Path, method: dict[str, Any], engine: str = "serial") -> dict[str, Any]:
    return {
        "data": {"source": "text", "path": str(write_reviews(folder / "reviews.jsonl"))},
        "stream": {"kind": "domains"},
        "clients": {"count": 2},
        "model": {"kind": "text", "init": str(write_bert(folder / "bert"))},
        "method": method,
        "train": {"rounds": 2, "optimizer": "adam", "lr": 0.02, "batch_size": 8, "max_steps": 2},
        "engine": {"kind": engine},
    }


@pytest.mark.parametrize("method", [{"kind": "pip", **LAYERS}, {"kind": "fed-l2p"}], ids=str)
def test_engines_agree(method: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for engine in ("serial", "vector"):
        experiment = prepare(parse(config(tmp_path, method, engine)))
        state = run_stream(experiment, experiment.start(), lambda *_: None)
        found.append(state.server.params)
    assert all(name.startswith(("prompt.", "head.")) for name in found[0])
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=2e-3, msg=name)


def test_a_model_names_its_backbone_and_refuses_another(tmp_path: Path) -> None:
    perdure.run(config(tmp_path, {"kind": "pip", **LAYERS}), out=tmp_path / "run")
    model = perdure.load(tmp_path / "run")
    assert not any(name.startswith("block") for name in model.server.params)
    file = tmp_path / "bert" / "model.safetensors"
    weights = load_file(file)
    save_file({name: value + 1e-3 for name, value in weights.items()}, file)
    file_hash.cache_clear()  # as in another process
    with pytest.raises(UserError, match="SHA-256"):
        perdure.load(tmp_path / "run").predict(model_input())


def model_input() -> Any:
    return torch.tensor([[2, 4, 8, 6, 3, 0, 0, 0, 0]], dtype=torch.int32)
