"""What transformer models share: their keys, and frozen backbones that take prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from perdure.config.model import ModelConfig
from perdure.config.section import NonNegativeInt
from perdure.core.errors import bad_value
from perdure.core.trees import Tensors
from perdure.models.layers import Card
from perdure.models.ops import ForwardPass
from perdure.models.pretrained import (
    BUILTIN,
    RANDOM_START,
    PretrainedWeights,
    find_weights,
    from_card,
)
from perdure.models.transformer import Encoder, Prefixes

# ---- The keys of pretrained transformers


class BackboneModel(ModelConfig):
    """A pretrained transformer."""

    bias: bool = True
    """Whether layers have a bias; of residual networks, vit and text the head alone."""
    init: str | None = None
    """Pretrained weights: a folder with a Hugging Face checkpoint, or its name on the hub. Default:
    the bundled (vit) or installed (text) weights. `random`: a vit that is not pretrained."""
    train_layers: NonNegativeInt | None = None
    """Blocks that are trained, counted from the last; the others are frozen and never sent.
    Default: all."""

    weights_type: ClassVar[str] = ""
    """Hugging Face's type of its checkpoints."""
    takes_prompts: ClassVar[bool] = True

    @property
    def weights_file(self) -> str | None:
        """Return None, since a backbone reads its pretrained weights itself."""
        return None

    @property
    def is_pretrained(self) -> bool:
        """Whether its features mean something before any training."""
        return self.init != RANDOM_START

    @property
    def named_weights(self) -> str | None:
        """Folder or name of the pretrained weights that the config names, or None."""
        return None if self.init in (BUILTIN, RANDOM_START) else self.init

    def pretrained(self, card: Card | None = None) -> PretrainedWeights | None:
        """Return the pretrained weights, those that a card names, or None for random ones."""
        if self.init == RANDOM_START:
            return None
        return from_card(card) if card else find_weights(self.init, self.weights_type)

    def head_has_bias(self, body: Any) -> bool:
        """Return whether the head has a bias."""
        return self.bias


def trained_blocks(blocks: int | None, depth: int) -> int | None:
    """Return the number of trained blocks; refuse more than the model has."""
    if blocks is not None and blocks > depth:
        raise bad_value("model.train_layers", blocks, f"0 to {depth}, the blocks of the model")
    return blocks


# ---- A frozen transformer that takes prompts


class PromptableBackbone(Protocol):
    """A transformer that takes prompts."""

    @property
    def feature_size(self) -> int:
        """Width of the tokens."""

    @property
    def card(self) -> dict[str, Any] | None:
        """Card of its pretrained weights, or None if it has none."""

    @property
    def encoder(self) -> Encoder:
        """Its blocks."""

    def frozen(self, device: torch.device | str = "cpu") -> Tensors:
        """Return its weights, as constants."""

    def embed(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the tokens [batch, N, width], the first of them CLS."""

    def padding(self, x: Tensor) -> Tensor | None:
        """Return the tokens that are padding, bool [batch, N]; None if there are none."""

    @property
    def pooled(self) -> int | None:
        """Number of encoded tokens that `pool` needs, from the first; None for all."""

    def pool(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the feature [batch, width] of encoded tokens [batch, N, width]."""


@dataclass(frozen=True)
class FrozenBackbone:
    """A backbone with its weights, which are not trained."""

    backbone: PromptableBackbone
    """The transformer."""
    weights: Tensors = field(repr=False, compare=False)
    """All its parameters, by name."""

    def features(self, x: Tensor, prefixes: Prefixes, fwd: ForwardPass) -> Tensor:
        """Return the feature of each row with prefixes in some blocks, [batch, width]."""
        padding = self.backbone.padding(x)
        tokens = self.backbone.embed(self.weights, x, fwd)
        first = self.backbone.pooled
        hidden = self.backbone.encoder(self.weights, tokens, fwd, prefixes, padding, first)
        return self.backbone.pool(hidden, padding)

    def project(self, block: int, prefix: Tensor) -> Tensor:
        """Return prefixes of keys and values after a block's projections W^K and W^V.

        Args:
            block: Number of the block, from 0.
            prefix: float [..., 2 * width]: what W^K is applied to, then what W^V is applied to.

        """
        layer = self.backbone.encoder.blocks[block][0]
        _, *matrices = self.weights[layer.name].chunk(3)
        _, *biases = self.weights[layer.bias_name].chunk(3)
        halves = zip(prefix.chunk(2, -1), matrices, biases, strict=True)
        return torch.cat([linear(half, matrix, bias) for half, matrix, bias in halves], -1)

    def with_tokens(self, x: Tensor, more: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the encodings of CLS and of tokens that are inserted after it.

        Args:
            x: Batch of inputs.
            more: Tokens to insert, float [batch, length, width].
            fwd: The forward pass.

        Returns:
            The encodings, float [batch, 1 + length, width].

        """
        padding = self.backbone.padding(x)
        tokens = self.backbone.embed(self.weights, x, fwd)
        tokens = torch.cat([tokens[:, :1], more, tokens[:, 1:]], dim=1)
        if padding is not None:  # CLS is never padding, and neither are prompts
            padding = pad(padding, (more.shape[1], 0), value=False)
        first = 1 + more.shape[1]
        return self.backbone.encoder(self.weights, tokens, fwd, {}, padding, first)
