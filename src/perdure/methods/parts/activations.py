"""What a client sees of its layers' inputs: the global model on its own data, without dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from perdure.algebra.columns import layer_columns
from perdure.methods.base import Client
from perdure.methods.parts.protection import FEATURES, HEAD
from perdure.models.layers import Layer

_ROWS = 64


class Holder(Protocol):
    """Takes in columns block by block."""

    def add(self, block: Tensor) -> None:
        """Take in d x n more columns."""


def observe(
    client: Client, layers: tuple[Layer, ...], holders: Mapping[str, Holder], rows: Tensor
) -> None:
    """Give each layer's input columns on these rows of the client's data to the layer's holder."""
    with torch.no_grad():
        for part in torch.split(rows, _ROWS):
            taps: dict[str, Tensor] = {}
            features = client.net(taps).features(client.params, client.shard.batch(part).x)
            taps |= {HEAD: features, FEATURES: features}
            for layer in layers:
                holders[layer.name].add(layer_columns(taps[layer.name], layer))


def some_rows(client: Client, count: int, generator: torch.Generator) -> Tensor:
    """At most `count` of the client's rows, drawn without replacement."""
    index = client.shard.index
    return index[torch.randperm(len(index), generator=generator)[:count].to(index.device)]
