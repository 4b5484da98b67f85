"""Texts as rows of tokens for models that read text, and as counts of words for others."""

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

from perdure.config import Config
from perdure.core.errors import bad_value
from perdure.core.registry import require
from perdure.data.examples import Source, Text
from perdure.models.layers import Card
from perdure.models.pretrained import PretrainedWeights
from perdure.models.text_encoder import TextModel

# ---- Texts as rows of tokens, for models that read text (`model.kind: text`)

Tokenize = Callable[[Sequence[Text]], list[list[int]]]
"""Returns the tokens of each text, with the special ones at its ends, cut to a length. A pair is
joined as the tokenizer joins pairs, such as `[CLS] first [SEP] second [SEP]`."""
_PADDING = ("[PAD]", "<pad>")
_FILES = ("tokenizer.json", "vocab.txt")


def tokenize_if_text(sources: list[Source], config: Config, padded: bool = False) -> list[Source]:
    """Return the sources with their texts as tokens if the model reads text, else unchanged.

    All rows have the length of the longest text, at most `model.max_tokens`.

    Raises:
        UserError: The model reads text, but a source contains none.

    """
    model: Any = config.model
    if not model.reads_text:
        return sources
    without = next((source.name for source in sources if source.train.texts is None), None)
    if without is not None:
        expected = f"a model for images, since {without} contains no texts"
        raise bad_value("model.kind", "text", expected)
    tokenize, padding = load_tokenizer(model)
    tokens = [
        [tokenize(part.texts or []) for part in (source.train, source.test)] for source in sources
    ]
    longest = max(len(row) for both in tokens for rows in both for row in rows)
    length = model.max_tokens if padded else longest
    return [
        _with_rows(source, *(pad_rows(rows, length, padding) for rows in both))
        for source, both in zip(sources, tokens, strict=True)
    ]


def tokenize_to(source: Source, config: Config, shape: tuple[int, ...]) -> Source:
    """Return a source with its texts as rows of `shape[0]` tokens if the model reads text."""
    model: Any = config.model
    if not model.reads_text or source.train.texts is None:
        return source
    parts = (source.train, source.test)
    rows = [token_rows(part.texts or [], model, shape[0]) for part in parts]
    return _with_rows(source, *rows)


def _with_rows(source: Source, train: Tensor, test: Tensor) -> Source:
    return replace(
        source,
        train=replace(source.train, x=train, texts=None),
        test=replace(source.test, x=test, texts=None),
    )


def token_rows(
    texts: Sequence[Text], config: TextModel, length: int, card: Card | None = None
) -> Tensor:
    """Return texts as rows of tokens, int32 [N, length]."""
    tokenize, padding = load_tokenizer(config.model_copy(update={"max_tokens": length}), card)
    return pad_rows(tokenize(texts), length, padding)


def pad_rows(rows: list[list[int]], length: int, padding: int) -> Tensor:
    """Return rows of unequal length as int32 [N, length], filled up with the token `padding`."""
    out = np.full((len(rows), length), padding, np.int32)
    for index, row in enumerate(rows):
        out[index, : len(row)] = row
    return torch.from_numpy(out)


def load_tokenizer(config: TextModel, card: Card | None = None) -> tuple[Tokenize, int]:
    """Return the tokenizer of a pretrained model, and the padding token.

    Raises:
        UserError: There is no pretrained model, or its tokenizer does not fit its model.

    """
    pretrained = config.pretrained(card)
    if pretrained is None:
        expected = "a pretrained model, since a text model needs its tokenizer"
        raise bad_value("model.init", config.init, expected)
    tokenizer = _open_tokenizer(pretrained.folder, pretrained.name)
    vocabulary = pretrained.integer("vocab_size")
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocabulary:
        expected = (
            f"a model whose tokenizer fits it (the tokenizer's tokens go up to {largest}, "
            f"the model's to {vocabulary - 1})"
        )
        raise bad_value("model.init", pretrained.name, expected)
    padding = _padding_token(pretrained, vocabulary, tokenizer)
    return _truncating(tokenizer, config.max_tokens), padding


def _padding_token(pretrained: PretrainedWeights, vocabulary: int, tokenizer: Any) -> int:
    padding = pretrained.integer("pad_token_id", 0, minimum=0)
    if padding >= vocabulary:
        raise pretrained.invalid_setting(
            "pad_token_id", padding, f"a token below vocab_size ({vocabulary})"
        )
    named = [token for token in map(tokenizer.token_to_id, _PADDING) if token is not None]
    if named and padding not in named:  # every such word of a text would be taken for padding
        raise pretrained.invalid_setting(
            "pad_token_id", padding, f"{named[0]}, the padding token of its tokenizer"
        )
    return padding


def _truncating(tokenizer: Any, length: int) -> Tokenize:
    def tokenize(texts: Sequence[Text]) -> list[list[int]]:
        is_pair = any(not isinstance(text, str) for text in texts)
        special = tokenizer.num_special_tokens_to_add(is_pair)
        if length <= special:
            raise bad_value("model.max_tokens", length, f"more than {special}, which mark the ends")
        tokenizer.no_padding()
        tokenizer.enable_truncation(length)
        return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]

    return tokenize


def _vocabulary_options(folder: Path) -> dict[str, Any]:
    """Return the options for a bare vocabulary from tokenizer_config.json. Default: lower case."""
    path = folder / "tokenizer_config.json"
    options = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {
        "lowercase": options.get("do_lower_case", True),
        "strip_accents": options.get("strip_accents"),
        "handle_chinese_chars": options.get("tokenize_chinese_chars", True),
    }


@lru_cache(maxsize=4)
def _open_tokenizer(folder: Path, name: str) -> Any:
    """Return the tokenizer in the folder of a pretrained model."""
    tokenizers = require("tokenizers", "model.kind", "text")
    path = next((folder / file for file in _FILES if (folder / file).is_file()), None)
    if path is None:
        raise bad_value("model.init", name, f"a model with {' or '.join(_FILES)}")
    try:
        if path.name == _FILES[0]:
            return tokenizers.Tokenizer.from_file(str(path))
        return tokenizers.BertWordPieceTokenizer(str(path), **_vocabulary_options(folder))
    except Exception as error:  # tokenizers raises bare exceptions
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise bad_value("model.init", name, f"a model with a valid tokenizer ({reason})") from None


# ---- Texts as counts of hashed words, for models that are not text models

_CHUNK = 4096


def hash_words(texts: Sequence[Text], features: int) -> Tensor:
    """Return word counts by hash, uint8 [N, features]."""
    from sklearn.feature_extraction.text import HashingVectorizer

    words = HashingVectorizer(n_features=features, norm=None, alternate_sign=False)
    out = np.empty((len(texts), features), np.uint8)
    for start in range(0, len(texts), _CHUNK):
        chunk = [_joined(text) for text in texts[start : start + _CHUNK]]
        out[start : start + _CHUNK] = words.transform(chunk).toarray().clip(0, 255)
    return torch.from_numpy(out)


def _joined(text: Text) -> str:
    return text if isinstance(text, str) else " ".join(text)
