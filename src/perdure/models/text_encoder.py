"""Text encoder of the BERT type, post-norm (Devlin et al., 2019), such as MiniLM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.core.trees import Tensors
from perdure.models.backbone_init import RANDOM_INIT, BackboneInit
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import Layer
from perdure.models.transformer import Encoder


@dataclass(frozen=True)
class TextEncoder:
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

    @property
    def feature_size(self) -> int:
        """Width of the tokens."""
        return self.encoder.width

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

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every trained weight matrix, in the order of the forward pass.

        Embeddings are not included: they are looked up, not multiplied.
        """
        return self.backbone_init.trained_layers(self, ())

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial values of the trained parameters, and no buffers."""
        return self.backbone_init.initial_params(self, generator), {}

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

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the mean of the encoded real tokens, [batch, width]."""
        full, padding = self.backbone_init.all_params(self, params, str(x.device)), self.padding(x)
        hidden = self.encoder(full, self.embed(full, x, fwd), fwd, padding=padding)
        return self.pool(hidden, padding)
