"""JSON of strangers that is nested too deep to be read: in data, inputs and records of trackers."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from perdure.cli.main import main
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.deploy.prediction_input import read_input
from perdure.models.pretrained import find_weights
from perdure.runs.tracking.mlflow import MlflowTracker

DEEP = "[" * 100_000


def test_rows_of_a_text_file(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": "b"}\n' + DEEP + "\n")
    settings = [f"data.path={path}", "data.label_column=label", "data.text_column=text"]
    config = {"data": {"source": "text"}, "stream": {"tasks": 1}, "model": {"kind": "mlp"}}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    options = [word for setting in settings for word in ("--set", setting)]
    assert main(["check", str(tmp_path / "c.yaml"), *options]) == 2
    sentence = capsys.readouterr().err
    assert "line 2: nested too deep" in sentence
    assert sentence.count("\n") == 1


def test_rows_to_predict(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n' + DEEP + "\n")
    model = SimpleNamespace(
        shape=(8,), config=parse({"data": {"source": "text", "path": "x.jsonl"}})
    )
    with pytest.raises(UserError, match="row 2: nested too deep"):
        read_input(path, model)


def test_the_config_of_a_pretrained_model(tmp_path):
    (tmp_path / "config.json").write_text(DEEP)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"a folder whose config\.json is a JSON object"):
        find_weights(str(tmp_path), "vit")


@pytest.mark.parametrize("text", [DEEP, "{}", "[]", "null", ""])
def test_the_record_of_a_tracker(tmp_path, text):
    (tmp_path / "mlflow.json").write_text(text)
    assert MlflowTracker.reopen(SimpleNamespace(), tmp_path) is None
