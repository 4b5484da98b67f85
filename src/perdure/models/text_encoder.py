"""Text encoder of the BERT type, post-norm (Devlin et al., 2019), such as MiniLM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.config.section import PositiveInt
from perdure.core.errors import bad_value
from perdure.core.trees import Tensors
from perdure.models.backbones import BackboneModel, trained_blocks
from perdure.models.layers import Body, BodySetup, set_facts
from perdure.models.ops import ForwardPass
from perdure.models.transformer import Encoder
from perdure.models.weights import RANDOM_INIT, BackboneInit


@dataclass(frozen=True)
class TextEncoder(Body):
    """A transformer over token ids, whose feature is the mean over the real tokens.

    MiniLM was trained with this feature as a sentence encoder. Its last step, scaling the mean to
    length 1, is left out, since the head does not need it. Token 0 of `encode` is CLS.
    """

    encoder: Encoder
    """The stack of blocks."""
    vocabulary_size: int
    """Number of token ids."""
    positions: int
    """Largest number of tokens per row."""
    segment_types: int = 2
    """Number of segment types; all tokens of a text have the first one."""
    pad_token: int = 0
    """Token id of padding."""
    backbone_init: BackboneInit = RANDOM_INIT
    """Initial weights, and the number of trained blocks."""

    def __post_init__(self) -> None:
        """Take the facts of a body from the encoder and the initial weights."""
        set_facts(
            self,
            feature_size=self.encoder.width,
            layers=self.backbone_init.trained_layers(self, ()),  # embeddings are looked up
        )

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, trained or not."""
        width = self.encoder.width
        return {
            "words": (self.vocabulary_size, width),
            "positions": (self.positions, width),
            "kinds": (self.segment_types, width),
            "embedding_norm.weight": (width,),
            "embedding_norm.bias": (width,),
            **self.encoder.shapes,
        }

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial values of the trained parameters, and no buffers."""
        return self.backbone_init.initial_params(self, generator), {}

    @property
    def card(self) -> dict[str, Any] | None:
        """Name, kind, config and SHA-256 of its pretrained weights, or None if it has none."""
        return self.backbone_init.card

    def frozen(self, device: torch.device | str = "cpu") -> Tensors:
        """Return the initial values of all parameters, as constants for a frozen backbone."""
        return self.backbone_init.constants(self, str(device))

    def embed(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the embeddings [batch, N, width] of token ids [batch, N]; the first is CLS."""
        offsets = params["positions"][: x.shape[-1]] + params["kinds"][0]
        tokens = F.embedding(x, params["words"]) + offsets
        return self.encoder.norm(params, tokens, "embedding_norm")

    def padding(self, x: Tensor) -> Tensor | None:
        """Return which token ids are padding, bool [batch, N]."""
        return x == self.pad_token

    @property
    def pooled(self) -> int | None:
        """Number of encoded tokens that `pool` needs; None for all."""
        return None

    def pool(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return the mean of encoded tokens [batch, N, width] without padding: [batch, width]."""
        if padding is None:
            return hidden.mean(1)
        real = (~padding).to(hidden.dtype)
        return (hidden * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True).clamp(min=1)

    def features(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, tasks: int | None = None
    ) -> Tensor:
        """Return the mean of the encoded real tokens, [batch, width]."""
        full, padding = self.backbone_init.all_params(self, params, str(x.device)), self.padding(x)
        hidden = self.encoder(full, self.embed(full, x, fwd), fwd, padding=padding)
        return self.pool(hidden, padding)


class TextModel(BackboneModel):
    """A transformer that encodes texts.

    Example: `model: {kind: text, max_tokens: 32}`
    """

    max_tokens: PositiveInt = 64
    """Maximum number of tokens of a text; longer ones are cut."""

    weights_type: ClassVar[str] = "bert"
    reads_text: ClassVar[bool] = True

    def make_body(self, shape: tuple[int, ...], classes: int, setup: BodySetup) -> TextEncoder:
        """Return the text encoder without its head."""
        pretrained, length = self.pretrained(setup.card), shape[0]
        if pretrained is None:
            expected = "a pretrained model, since a text model needs its tokenizer"
            raise bad_value("model.init", self.init, expected)
        blocks = trained_blocks(self.train_layers, pretrained.integer("num_hidden_layers"))
        text = TextEncoder(
            pretrained.encoder(pre_norm=False),
            pretrained.integer("vocab_size"),
            pretrained.integer("max_position_embeddings"),
            pretrained.integer("type_vocab_size", 2),
            pretrained.integer("pad_token_id", 0, minimum=0),
            BackboneInit(pretrained, blocks),
        )
        if length > text.positions:
            expected = f"1 to {text.positions}, the positions of the model"
            raise bad_value("model.max_tokens", length, expected)
        if setup.card is None:
            text.frozen()  # so that bad weights are refused before training
        return text
