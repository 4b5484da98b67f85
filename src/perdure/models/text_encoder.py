"""Text encoder of the BERT type, post-norm (Devlin et al., 2019; MiniLM is one)."""

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
from perdure.models.transformer import NO_PREFIXES, Encoder, Prefixes


@dataclass(frozen=True)
class TextEncoder:
    """Token numbers through an encoder; the feature is the mean over the real tokens.

    That is what MiniLM was trained for as a sentence encoder. Its last step there, bringing the
    mean to length one, is left out: the head after it does not ask for it. CLS is token 0 of
    `encode`.
    """

    encoder: Encoder
    vocabulary: int
    positions: int
    """The longest sequence that the model knows positions for."""
    kinds: int = 2
    """Kinds of segments that the model knows; a text is all of the first kind."""
    blank: int = 0
    """The token that fills a row up."""
    start: BackboneInit = RANDOM_INIT

    @property
    def feature_size(self) -> int:
        """Width of the tokens."""
        return self.encoder.width

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, trained or not."""
        width = self.encoder.width
        return {
            "words": (self.vocabulary, width),
            "positions": (self.positions, width),
            "kinds": (self.kinds, width),
            "embedding_norm.weight": (width,),
            "embedding_norm.bias": (width,),
            **self.encoder.shapes,
        }

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every weight matrix that is trained, in the order of the forward pass.

        Embeddings are not among them: they are looked up, not multiplied.
        """
        return self.start.trained_layers(self, ())

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """First parameters of what is trained: pretrained, or random."""
        return self.start.trained(self, generator), {}

    def frozen(self, device: torch.device | str = "cpu") -> Tensors:
        """All parameters as they start, as constants: for prompts on a frozen backbone."""
        return self.start.constants(self, str(device))

    def embed(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Token numbers [batch, N] as tokens [batch, N, width]: CLS first, positions added."""
        places = params["positions"][: x.shape[-1]] + params["kinds"][0]
        tokens = F.embedding(x, params["words"]) + places
        return self.encoder.norm(params, tokens, "embedding_norm")

    def padding(self, x: Tensor) -> Tensor | None:
        """Bool [batch, N]: true for tokens that only fill the row up."""
        return x == self.blank

    def encode(
        self,
        params: Tensors,
        tokens: Tensor,
        fwd: ForwardPass,
        prefixes: Prefixes = NO_PREFIXES,
        padding: Tensor | None = None,
        first: int | None = None,
    ) -> Tensor:
        """Tokens after all blocks, [batch, N, width]; the `first` ones alone."""
        return self.encoder(params, tokens, fwd, prefixes, padding, first)

    @property
    def pooled(self) -> int | None:
        """Encoded tokens that `pool` needs: all."""
        return None

    def pool(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """The feature among encoded tokens: their mean, without padding."""
        if padding is None:
            return hidden.mean(1)
        real = (~padding).to(hidden.dtype)
        return (hidden * real.unsqueeze(-1)).sum(1) / real.sum(1, keepdim=True).clamp(min=1)

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """The mean of the encoded real tokens."""
        full, padding = self.start.full(self, params, str(x.device)), self.padding(x)
        hidden = self.encode(full, self.embed(full, x, fwd), fwd, padding=padding)
        return self.pool(hidden, padding)
