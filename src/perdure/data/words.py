"""Texts as counts of hashed words, for models that are not text models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from perdure.data.source import Text

_CHUNK = 4096


def hash_words(texts: Sequence[Text], features: int) -> Tensor:
    """Return word counts by hash, uint8 [N, features].

    Args:
        texts: The texts; the words of a pair are counted together.
        features: Number of hash values. Words with the same one are counted together.
    """
    from sklearn.feature_extraction.text import HashingVectorizer

    words = HashingVectorizer(n_features=features, norm=None, alternate_sign=False)
    out = np.empty((len(texts), features), np.uint8)
    for start in range(0, len(texts), _CHUNK):
        chunk = [_joined(text) for text in texts[start : start + _CHUNK]]
        out[start : start + _CHUNK] = words.transform(chunk).toarray().clip(0, 255)
    return torch.from_numpy(out)


def _joined(text: Text) -> str:
    return text if isinstance(text, str) else " ".join(text)
