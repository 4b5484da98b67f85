"""Join several sources into one, over one label space."""

from __future__ import annotations

from dataclasses import replace

import torch

from perdure.config import Config, DomainConfig
from perdure.core.rng import Rng
from perdure.data.clients import check_clients, unify_clients
from perdure.data.resize import unify_shapes
from perdure.data.source import Examples, Source
from perdure.data.streams.class_names import unify_classes
from perdure.data.streams.domains import label_space, listed
from perdure.data.tokenization import tokenize_if_text


def joined_source(domains: list[DomainConfig], labels: str, config: Config, rng: Rng) -> Source:
    """Return the sources of `stream.domains` as one, brought to one shape.

    Args:
        domains: The sources.
        labels: `shared` (one label space) or `separate` (one per source).
        config: The whole config.
        rng: Derives the draws.
    """
    sources = unify_shapes(tokenize_if_text(listed(domains, config, rng), config))
    sources = unify_clients(sources)
    check_clients(config, sources[0])
    sources = unify_classes(sources) if labels == "shared" else sources
    offsets, names = label_space(sources, labels)
    name = " and ".join(source.name for source in sources)
    train = _together([source.train for source in sources], offsets)
    test = _together([source.test for source in sources], offsets)
    return replace(sources[0], name=name, train=train, test=test, class_names=names, texts=None)


def _together(parts: list[Examples], offsets: list[int]) -> Examples:
    labels = [part.y + offset for part, offset in zip(parts, offsets, strict=True)]
    clients = [part.clients for part in parts if part.clients is not None]
    named = torch.cat(clients) if len(clients) == len(parts) else None
    return Examples(torch.cat([part.x for part in parts]), torch.cat(labels), named)
