"""Several sources as one: their rows together, over one label space."""

from __future__ import annotations

import torch

from perdure.config import Config
from perdure.core.rng import Rng
from perdure.data.resize import unify_shapes
from perdure.data.source import Examples, Source
from perdure.data.streams.domains import label_space, listed
from perdure.data.tokenization import tokenize_if_text


def joined_source(config: Config, rng: Rng) -> Source:
    """The sources of stream.domains, brought to one shape; stream.labels says whose labels meet."""
    sources = unify_shapes(tokenize_if_text(listed(config, rng), config))
    offsets, names = label_space(sources, config.stream.labels)
    name = " and ".join(source.name for source in sources)
    train = _together([source.train for source in sources], offsets)
    test = _together([source.test for source in sources], offsets)
    return Source(name, train, test, names)


def _together(parts: list[Examples], offsets: list[int]) -> Examples:
    labels = [part.y + offset for part, offset in zip(parts, offsets, strict=True)]
    return Examples(torch.cat([part.x for part in parts]), torch.cat(labels))
