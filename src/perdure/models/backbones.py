"""Backbones: the transformers that a config describes, and frozen ones that take prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from perdure.config import TextModel, VitModel
from perdure.core.errors import bad_value
from perdure.core.trees import Tensors
from perdure.models.encoders import TextEncoder, Vit
from perdure.models.ops import ForwardPass
from perdure.models.pretrained import RANDOM_START, PretrainedWeights, find_weights, from_card
from perdure.models.transformer import Encoder, Prefixes
from perdure.models.weights import BackboneInit

# ------------------------------------------------------------------------------------------------
# A frozen transformer that takes prompts.
# ------------------------------------------------------------------------------------------------


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


# ------------------------------------------------------------------------------------------------
# Build the transformer backbones that a config describes: vit and text.
# ------------------------------------------------------------------------------------------------

Card = dict[str, Any]
"""Identifies pretrained weights: their name, kind, config and SHA-256."""
_Body = TypeVar("_Body", Vit, TextEncoder)
_TYPES = {"vit": "vit", "text": "bert"}


def backbone_weights(
    config: VitModel | TextModel, card: Card | None = None
) -> PretrainedWeights | None:
    """Return the pretrained weights of a config, or None for random weights."""
    if config.init == RANDOM_START:
        return None
    return from_card(card) if card else find_weights(config.init, _TYPES[config.kind])


def make_vit(config: VitModel, shape: tuple[int, int, int], card: Card | None = None) -> Vit:
    """Return the vision transformer of a config."""
    pretrained = backbone_weights(config, card)
    if pretrained is None:
        return _random_vit(config, shape)
    start = BackboneInit(
        pretrained, _trained_blocks(config, pretrained.integer("num_hidden_layers"))
    )
    patch = pretrained.integer("patch_size", 16)
    vit = Vit(
        _encoder(pretrained, pre_norm=True),
        pretrained.integer("num_channels", 3),
        pretrained.integer("image_size", 224, minimum=patch),
        patch,
        start,
    )
    return vit if card else _read(vit)


def make_text(config: TextModel, length: int, card: Card | None = None) -> TextEncoder:
    """Return the text encoder of a config."""
    pretrained = backbone_weights(config, card)
    if pretrained is None:
        expected = "a pretrained model, since a text model needs its tokenizer"
        raise bad_value("model.init", config.init, expected)
    text = TextEncoder(
        _encoder(pretrained, pre_norm=False),
        pretrained.integer("vocab_size"),
        pretrained.integer("max_position_embeddings"),
        pretrained.integer("type_vocab_size", 2),
        pretrained.integer("pad_token_id", 0, minimum=0),
        BackboneInit(pretrained, _trained_blocks(config, pretrained.integer("num_hidden_layers"))),
    )
    if length > text.positions:
        expected = f"1 to {text.positions}, the positions of the model"
        raise bad_value("model.max_tokens", length, expected)
    return text if card else _read(text)


def _read(body: _Body) -> _Body:
    """Return the body after reading its weights, so that bad ones are refused before training."""
    body.frozen()
    return body


def _random_vit(config: VitModel, shape: tuple[int, int, int]) -> Vit:
    channels, height, width = shape
    size, heads, depth = config.width or 128, config.heads or 4, config.depth or 6
    patch = config.patch or 7
    if size % heads:
        raise bad_value("model.heads", heads, f"a divisor of model.width ({size})")
    side = -(-max(height, width) // patch) * patch
    encoder = Encoder(size, depth, heads, 4 * size, pre_norm=True)
    return Vit(encoder, channels, side, patch, BackboneInit(None, _trained_blocks(config, depth)))


def _trained_blocks(config: VitModel | TextModel, depth: int) -> int | None:
    blocks = config.train_layers
    if blocks is not None and blocks > depth:
        raise bad_value("model.train_layers", blocks, f"0 to {depth}, the blocks of the model")
    return blocks


def _encoder(pretrained: PretrainedWeights, pre_norm: bool) -> Encoder:
    """Return the blocks that the config.json of pretrained weights describes."""
    activation = pretrained.settings.get("hidden_act", "gelu")
    if activation != "gelu":
        raise pretrained.invalid_setting("hidden_act", activation, "gelu")
    width, heads = pretrained.integer("hidden_size"), pretrained.integer("num_attention_heads")
    if width % heads:
        raise pretrained.invalid_setting("num_attention_heads", heads, f"a divisor of {width}")
    return Encoder(
        width,
        pretrained.integer("num_hidden_layers"),
        heads,
        pretrained.integer("intermediate_size"),
        pre_norm,
        pretrained.nonnegative_float("layer_norm_eps", 1e-12),
    )
