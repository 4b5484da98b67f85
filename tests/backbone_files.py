"""Small checkpoints in Hugging Face's format, random, written without its library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from perdure.core.trees import Tensors
from perdure.models.pretrained import to_huggingface
from perdure.models.text_encoder import TextEncoder
from perdure.models.transformer import Encoder
from perdure.models.vit import Vit

WORDS = ("the", "a", "good", "bad", "book", "film", "song", "game", "very", "not")
MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
BLOCKS = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


def write_vit(folder: Path, size: int = 8, patch: int = 4, channels: int = 1) -> Path:
    """A ViT for images of `size` pixels a side."""
    body = Vit(Encoder(16, 3, 2, 24, pre_norm=True), channels, size, patch)
    shapes = {
        "embeddings.cls_token": (1, 1, 16),
        "embeddings.position_embeddings": (1, body.tokens, 16),
        "embeddings.patch_embeddings.projection.weight": (16, channels, patch, patch),
    }
    params, _ = body.init(torch.Generator().manual_seed(3))
    config = {"image_size": size, "patch_size": patch, "num_channels": channels}
    return _written(folder, "vit", to_huggingface(params, shapes, "vit", 3), config)


def write_bert(folder: Path, positions: int = 24, vocabulary: int | None = None) -> Path:
    """A text encoder that knows WORDS."""
    tokens = (*MARKS, *WORDS)
    count = len(tokens) if vocabulary is None else vocabulary
    body = TextEncoder(Encoder(16, 3, 2, 24, pre_norm=False), count, positions)
    params, _ = body.init(torch.Generator().manual_seed(4))
    params = {name: value * 5 if "norm" not in name else value for name, value in params.items()}
    config = {"vocab_size": count, "max_position_embeddings": positions, "pad_token_id": 0}
    _written(folder, "bert", to_huggingface(params, {}, "bert", 3), config)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return folder


def _written(folder: Path, kind: str, values: Tensors, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(values, folder / "model.safetensors")
    said = {"model_type": kind, **BLOCKS, **config}
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder


def write_reviews(path: Path, rows: int = 48) -> Path:
    """JSON lines: reviews of books and films, good ones and bad ones."""
    lines = []
    for row in range(rows):
        word, domain = ("good", "bad")[row % 2], ("book", "film")[row // 2 % 2]
        text = " ".join(["the", domain, *["very"] * (row % 5), word])
        lines.append(json.dumps({"text": text, "label": word, "domain": domain}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path
