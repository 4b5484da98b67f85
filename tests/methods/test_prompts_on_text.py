"""Prompts and other methods on a text encoder: both engines, and a backbone that was exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import perdure
from backbone_files import write_bert, write_reviews
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.models.pretrained import file_hash
from perdure.training.engines.vector import VectorEngine
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream

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
        values = config(tmp_path, method, engine)
        values["train"] |= {"max_steps": 4, "lr": 0.005}  # steps are recorded from the third on
        experiment = build_experiment(parse(values))
        state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
        if isinstance(experiment.engine, VectorEngine):
            assert not experiment.engine.choice()["serial"]  # it has not fallen back
        found.append(state.server.params)
    assert all(name.startswith(("prompt.", "head.")) for name in found[0])
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-3, atol=2e-3, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize(
    "method",
    [
        {"kind": "er", "budget": 4, "replay_batch": 3},
        {"kind": "ewc"},
        {"kind": "lwf"},
        {"kind": "stamp", "budget": 2, "mixstyle": False},
    ],
    ids=str,
)
def test_methods_of_other_papers_run_on_texts(
    method: dict[str, Any], engine: str, tmp_path: Path
) -> None:
    experiment = build_experiment(parse(config(tmp_path, method, engine)))
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    assert all(torch.isfinite(value).all() for value in state.server.params.values())
    if isinstance(experiment.engine, VectorEngine):
        assert not experiment.engine.choice()["serial"]


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"kind": "stamp"}, "method.mixstyle: must be false with model.kind text, got True"),
        (
            {"kind": "fed-l2p", "length": 17},
            "method.length: must be 1 to 16 (model.max_tokens), got 17",
        ),
    ],
    ids=str,
)
def test_configs_that_text_does_not_support_are_refused(
    method: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    values = config(tmp_path, method)
    values["model"]["max_tokens"] = 16
    with pytest.raises(UserError) as caught:
        build_experiment(parse(values))
    assert str(caught.value).startswith(sentence)


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
