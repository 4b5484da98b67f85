"""Transformer backbones from a config: vit and text."""

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
_Body = TypeVar("_Body", Vit, TextEncoder)
_TYPES = {"vit": "vit", "text": "bert"}


def backbone_checkpoint(
    config: VitModel | TextModel, card: Card | None = None
) -> PretrainedWeights | None:
    """Return the pretrained weights of a config, or those that a trained model's card names.

    None if the model starts from random weights.
    """
    if config.init == RANDOM_START:
        return None
    return from_card(card) if card else find_weights(config.init, _TYPES[config.kind])


def backbone_card(body: object) -> Card | None:
    """Return what identifies the pretrained weights of a backbone, or None if it has none."""
    found = body.start.pretrained if isinstance(body, Vit | TextEncoder) else None
    return found.card() if isinstance(found, PretrainedWeights) else None


def make_vit(config: VitModel, shape: tuple[int, int, int], card: Card | None = None) -> Vit:
    """Return the vision transformer of a config for images of a shape."""
    checkpoint = backbone_checkpoint(config, card)
    if checkpoint is None:
        return _random_vit(config, shape)
    start = BackboneInit(
        checkpoint, _trained_blocks(config, checkpoint.number("num_hidden_layers"))
    )
    patch = checkpoint.number("patch_size", 16)
    vit = Vit(
        _encoder(checkpoint, pre_norm=True),
        checkpoint.number("num_channels", 3),
        checkpoint.number("image_size", 224, least=patch),
        patch,
        start,
    )
    return vit if card else _read(vit)


def make_text(config: TextModel, length: int, card: Card | None = None) -> TextEncoder:
    """Return the text encoder of a config for rows of `length` tokens."""
    checkpoint = backbone_checkpoint(config, card)
    if checkpoint is None:
        allowed = "a checkpoint: a text model needs the tokenizer that comes with one"
        raise bad_value("model.init", config.init, allowed)
    text = TextEncoder(
        _encoder(checkpoint, pre_norm=False),
        checkpoint.number("vocab_size"),
        checkpoint.number("max_position_embeddings"),
        checkpoint.number("type_vocab_size", 2),
        checkpoint.number("pad_token_id", 0, least=0),
        BackboneInit(checkpoint, _trained_blocks(config, checkpoint.number("num_hidden_layers"))),
    )
    if length > text.positions:
        raise bad_value("model.max_tokens", length, f"1 to {text.positions}, as the model has it")
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


def _encoder(checkpoint: PretrainedWeights, pre_norm: bool) -> Encoder:
    """Return the blocks that a config.json describes."""
    act = checkpoint.settings.get("hidden_act", "gelu")
    if act != "gelu":
        raise checkpoint.bad("hidden_act", act, "gelu")
    width, heads = checkpoint.number("hidden_size"), checkpoint.number("num_attention_heads")
    if width % heads:
        raise checkpoint.bad("num_attention_heads", heads, f"a divisor of {width}")
    return Encoder(
        width,
        checkpoint.number("num_hidden_layers"),
        heads,
        checkpoint.number("intermediate_size"),
        pre_norm,
        checkpoint.real("layer_norm_eps", 1e-12),
    )
