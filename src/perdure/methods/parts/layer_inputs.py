"""Layer inputs of the global model on a client's own data, without dropout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.accumulators import ColumnSample, GramAccumulator
from perdure.contract import Client
from perdure.core.trees import Tensors
from perdure.methods.parts.protected_layers import FEATURES, HEAD
from perdure.models.layers import Layer

_ROWS = 64


class ColumnSink(Protocol):
    """Takes in columns block by block."""

    def add(self, block: Tensor) -> None:
        """Take in d x n more columns."""


def layer_columns(x: Tensor, layer: Layer) -> Tensor:
    """A layer's input as a matrix X whose columns its weight is applied to: d x n.

    For a convolution a column is a patch (im2col with the layer's own padding and stride), its rows
    ordered as W.reshape(outputs, -1): channels, then height, then width.
    """
    if layer.kind == "linear":
        return x.reshape(-1, x.shape[-1]).T
    patches = F.unfold(x, layer.kernel, padding=layer.padding, stride=layer.stride)
    return patches.transpose(0, 1).reshape(layer.inputs, -1)


def collect_layer_inputs(
    client: Client, layers: tuple[Layer, ...], holders: Mapping[str, ColumnSink], rows: Tensor
) -> None:
    """Give each layer's input columns on these rows of the client's data to the layer's holder."""
    with torch.no_grad():
        for part in torch.split(rows, _ROWS):
            layer_inputs: Tensors = {}
            features = client.features(client.data.batch(part), layer_inputs=layer_inputs)
            layer_inputs |= {HEAD: features, FEATURES: features}
            for layer in layers:
                holders[layer.name].add(layer_columns(layer_inputs[layer.name], layer))


def gram_roots(client: Client, layers: tuple[Layer, ...]) -> Tensors:
    """Return by layer a root R of the inputs X of all the client's rows: R R^T = X X^T."""
    held = {layer.name: GramAccumulator() for layer in layers}
    collect_layer_inputs(client, layers, held, client.data.index)
    return {name: spread.root() for name, spread in held.items()}


def sample_layer_inputs(
    client: Client, layers: tuple[Layer, ...], images: int, columns: int, generator: torch.Generator
) -> Tensors:
    """Return by layer at most `columns` random input columns, of at most `images` random rows."""
    rows = sample_rows(client, images, generator)
    held = {layer.name: ColumnSample(columns, generator) for layer in layers}
    collect_layer_inputs(client, layers, held, rows)
    return {name: sample.columns() for name, sample in held.items()}


def sample_rows(client: Client, count: int, generator: torch.Generator) -> Tensor:
    """Return at most `count` of the client's rows, drawn without replacement."""
    index = client.data.index
    return index[torch.randperm(len(index), generator=generator)[:count].to(index.device)]
