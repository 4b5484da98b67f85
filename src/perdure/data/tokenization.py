"""Texts as rows of token numbers, for models that read text (model.kind text)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config, ModelConfig
from perdure.core.errors import bad_value
from perdure.core.optional import require
from perdure.data.source import Examples, Source
from perdure.models.backbones import Card, backbone_checkpoint
from perdure.models.pretrained import PretrainedWeights

Numbers = Callable[[Sequence[str]], list[list[int]]]
"""Texts to token numbers, with what marks their beginning and end, cut to a length."""
_BLANKS = ("[PAD]", "<pad>")
_FILES = ("tokenizer.json", "vocab.txt")


def tokenize_if_text(sources: list[Source], config: Config) -> list[Source]:
    """The sources as they are, or for a text model their texts as rows of one length.

    That is the length of the longest text, at most model.max_tokens: shorter rows save work.
    """
    if config.model.kind != "text":
        return sources
    lacking = next((source.name for source in sources if source.texts is None), None)
    if lacking is not None:
        allowed = f"a model for images, since {lacking} holds no texts"
        raise bad_value("model.kind", "text", allowed)
    numbers, blank = tokenizer(config.model)
    parts = [[numbers(texts) for texts in source.texts or ()] for source in sources]
    length = max(len(row) for both in parts for rows in both for row in rows)
    return [
        _with_rows(source, *(padded(rows, length, blank) for rows in both))
        for source, both in zip(sources, parts, strict=True)
    ]


def _with_rows(source: Source, train: Tensor, test: Tensor) -> Source:
    return replace(
        source,
        train=Examples(train, source.train.y),
        test=Examples(test, source.test.y),
        texts=None,
    )


def token_rows(
    texts: Sequence[str], config: ModelConfig, length: int, card: Card | None = None
) -> Tensor:
    """Texts as rows of `length` token numbers, int32 [N, length]; longer ones are cut."""
    numbers, blank = tokenizer(config.model_copy(update={"max_tokens": length}), card)
    return padded(numbers(texts), length, blank)


def padded(rows: list[list[int]], length: int, blank: int) -> Tensor:
    """Rows of unequal length as int32 [N, length], filled up with the blank token."""
    out = np.full((len(rows), length), blank, np.int32)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
    return torch.from_numpy(out)


def tokenizer(config: ModelConfig, card: Card | None = None) -> tuple[Numbers, int]:
    """The tokenizer of a config's checkpoint, and the token that fills rows up."""
    checkpoint = backbone_checkpoint(config, card)
    if checkpoint is None:
        allowed = "a checkpoint: a text model needs the tokenizer that comes with one"
        raise bad_value("model.init", config.init, allowed)
    made = _opened(checkpoint.folder, checkpoint.name)
    words = checkpoint.number("vocab_size")
    highest = max(made.get_vocab().values(), default=0)
    if highest >= words:
        allowed = (
            f"a checkpoint whose tokenizer fits it (the tokenizer's tokens go up to {highest}, "
            f"the model's to {words - 1})"
        )
        raise bad_value("model.init", checkpoint.name, allowed)
    return _cutting(made, config.max_tokens), _blank(checkpoint, words, made)


def _blank(checkpoint: PretrainedWeights, words: int, made: Any) -> int:
    blank = checkpoint.number("pad_token_id", 0, least=0)
    if blank >= words:
        raise checkpoint.bad("pad_token_id", blank, f"below vocab_size, {words}")
    named = [number for number in map(made.token_to_id, _BLANKS) if number is not None]
    if named and blank not in named:  # every such word of a text would be taken for padding
        raise checkpoint.bad("pad_token_id", blank, f"{named[0]}, which is its tokenizer's")
    return blank


def _cutting(made: Any, length: int) -> Numbers:
    special = made.num_special_tokens_to_add(False)
    if length <= special:
        raise bad_value("model.max_tokens", length, f"more than {special}, which mark the ends")

    def numbers(texts: Sequence[str]) -> list[list[int]]:
        made.no_padding()
        made.enable_truncation(length)
        return [found.ids for found in made.encode_batch(list(texts))]

    return numbers


def _letters(folder: Path) -> dict[str, Any]:
    """How a bare vocabulary is to be read, from tokenizer_config.json: usually in lower case."""
    path = folder / "tokenizer_config.json"
    said = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {
        "lowercase": said.get("do_lower_case", True),
        "strip_accents": said.get("strip_accents"),
        "handle_chinese_chars": said.get("tokenize_chinese_chars", True),
    }


@lru_cache(maxsize=4)
def _opened(folder: Path, name: str) -> Any:
    """The tokenizer in a checkpoint's folder."""
    tokenizers = require("tokenizers", "model.kind", "text")
    path = next((folder / file for file in _FILES if (folder / file).is_file()), None)
    if path is None:
        raise bad_value("model.init", name, f"a checkpoint with {' or '.join(_FILES)}")
    try:
        if path.name == _FILES[0]:
            return tokenizers.Tokenizer.from_file(str(path))
        return tokenizers.BertWordPieceTokenizer(str(path), **_letters(folder))
    except Exception as error:  # the library raises bare ones
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise bad_value(
            "model.init", name, f"a checkpoint with a good tokenizer ({reason})"
        ) from None
