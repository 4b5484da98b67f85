"""Layer inputs of the global model on a client's examples, without dropout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.accumulators import ColumnSample, GramAccumulator
from perdure.contract import Client
from perdure.core.trees import Tensors
from perdure.methods.parts.protected_layers import FEATURES
from perdure.models.layers import Layer
from perdure.models.ops import PLAIN_CONV

_BATCH_ROWS = 64
_BLOCK_VALUES = 1 << 20
"""Values of a block of columns. Larger blocks leave the caches of a processor."""


class ColumnSink(Protocol):
    """Receives columns, some at a time."""

    def add(self, block: Tensor) -> None:
        """Add the columns of `block`, float [d, n]."""


def layer_columns(x: Tensor, layer: Layer) -> Tensor:
    """Return a layer's input as a matrix X of columns to which its weight is applied, [d, n].

    For a convolution a column is a patch (im2col with the layer's geometry), with the entries in
    the order of W.reshape(outputs, -1): channels, then height, then width. Of a grouped convolution
    the patches of all groups are columns, so that one subspace protects all its kernels.
    """
    if layer.kind == "linear":
        return x.reshape(-1, x.shape[-1]).T
    if layer.kernel == (1, 1) and layer.geometry == PLAIN_CONV:  # every pixel is a patch
        return x.transpose(0, 1).reshape(layer.inputs, -1)
    stride, padding, dilation, groups = layer.geometry.args
    patches = F.unfold(x, layer.kernel, dilation, padding, stride)
    patches = patches.reshape(len(x), groups, layer.inputs, -1)
    return patches.permute(2, 0, 1, 3).reshape(layer.inputs, -1)


def collect_layer_inputs(
    client: Client, layers: tuple[Layer, ...], sinks: Mapping[str, ColumnSink], rows: Tensor
) -> None:
    """Add the input columns of each layer to a sink.

    Args:
        client: The client.
        layers: The layers.
        sinks: The sink of each layer by weight name.
        rows: Rows of the task's training set to use.
    """
    with torch.no_grad():
        for batch_rows in torch.split(rows, _BATCH_ROWS):
            layer_inputs: Tensors = {}
            features = client.features(client.data.batch(batch_rows), layer_inputs=layer_inputs)
            heads = {layer.name: features for layer in client.context.network.head_layers}
            layer_inputs |= {**heads, FEATURES: features}
            for layer in layers:
                for block in column_blocks(layer_inputs[layer.name], layer):
                    sinks[layer.name].add(block)


def column_blocks(x: Tensor, layer: Layer) -> Iterator[Tensor]:
    """Yield the columns of a layer's input, some rows of x at a time."""
    values = x[0].numel() * math.prod(layer.kernel)
    for rows in torch.split(x, max(1, _BLOCK_VALUES // values)):
        yield layer_columns(rows, layer)


def gram_roots(client: Client, layers: tuple[Layer, ...]) -> Tensors:
    """Return by weight name the symmetric root of X X^T, with the layer's inputs X as columns."""
    grams = {layer.name: GramAccumulator() for layer in layers}
    collect_layer_inputs(client, layers, grams, client.data.index)
    return {name: gram.root() for name, gram in grams.items()}


def sample_layer_inputs(
    client: Client,
    layers: tuple[Layer, ...],
    max_examples: int,
    max_columns: int,
    generator: torch.Generator,
) -> Tensors:
    """Return by weight name a random sample of the layer's input columns, float [d, columns].

    Args:
        client: The client.
        layers: The layers.
        max_examples: Largest number of examples from which columns are drawn.
        max_columns: Largest number of columns per layer.
        generator: Source of the random choice.
    """
    rows = sample_rows(client, max_examples, generator)
    samples = {layer.name: ColumnSample(max_columns, generator) for layer in layers}
    collect_layer_inputs(client, layers, samples, rows)
    return {name: sample.columns() for name, sample in samples.items()}


def sample_rows(client: Client, count: int, generator: torch.Generator) -> Tensor:
    """Return at most `count` of the client's rows, drawn without replacement."""
    index = client.data.index
    return index[torch.randperm(len(index), generator=generator)[:count].to(index.device)]
