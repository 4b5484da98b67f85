"""Build the transformer backbones that a config describes: vit and text."""

from __future__ import annotations

from typing import Any, TypeVar

from perdure.config import TextModel, VitModel
from perdure.core.errors import bad_value
from perdure.models.backbone_init import BackboneInit
from perdure.models.pretrained import RANDOM_START, PretrainedWeights, find_weights, from_card
from perdure.models.text_encoder import TextEncoder
from perdure.models.transformer import Encoder
from perdure.models.vit import Vit

Card = dict[str, Any]
"""Identifies pretrained weights: their name, kind, config and SHA-256."""
_Body = TypeVar("_Body", Vit, TextEncoder)
_TYPES = {"vit": "vit", "text": "bert"}


def backbone_weights(
    config: VitModel | TextModel, card: Card | None = None
) -> PretrainedWeights | None:
    """Return the pretrained weights of a config, or None for random weights.

    Args:
        config: The model.
        card: Card of the weights that a trained model was built on. If None, the weights that
            `config.init` names.
    """
    if config.init == RANDOM_START:
        return None
    return from_card(card) if card else find_weights(config.init, _TYPES[config.kind])


def backbone_card(body: object) -> Card | None:
    """Return the card of a backbone's pretrained weights, or None if it has none."""
    pretrained = body.backbone_init.pretrained if isinstance(body, Vit | TextEncoder) else None
    return pretrained.card() if isinstance(pretrained, PretrainedWeights) else None


def make_vit(config: VitModel, shape: tuple[int, int, int], card: Card | None = None) -> Vit:
    """Return the vision transformer of a config.

    Args:
        config: The model.
        shape: Channels, height and width of the images.
        card: Card of the weights that a trained model was built on, whose file is not read yet.
    """
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
    """Return the text encoder of a config.

    Args:
        config: The model.
        length: Tokens per row.
        card: Card of the weights that a trained model was built on, whose file is not read yet.
    """
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
