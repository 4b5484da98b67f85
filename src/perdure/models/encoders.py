"""Encoders: vision transformers (pre-norm) and text encoders of the BERT type (post-norm)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import interpolate

from perdure.core.trees import Tensors
from perdure.models.layers import Body, Layer, linear_layer, set_facts
from perdure.models.ops import ForwardPass
from perdure.models.transformer import Encoder
from perdure.models.weights import RANDOM_INIT, BackboneInit

# ------------------------------------------------------------------------------------------------
# Vision transformer, pre-norm, as in ViT-B/16 (Dosovitskiy et al., 2021).
# ------------------------------------------------------------------------------------------------

_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Vit(Body):
    """A transformer over the patches of an image and a CLS token, which is the feature.

    Images may have any size and one or three channels: `embed` converts them to the size and
    channels of the model, so that data keep their original size in memory.
    """

    encoder: Encoder
    """The stack of blocks."""
    channels: int
    """Channels that the model was made for, 1 or 3."""
    size: int
    """Side in pixels that the model was made for."""
    patch: int
    """Side of a patch in pixels."""
    backbone_init: BackboneInit = RANDOM_INIT
    """Initial weights, and the number of trained blocks."""

    def __post_init__(self) -> None:
        """Take the facts of a body from the encoder and the initial weights."""
        set_facts(
            self,
            feature_size=self.encoder.width,
            layers=self.backbone_init.trained_layers(self, (self.patches,)),
        )

    @property
    def tokens(self) -> int:
        """Tokens per image: one per patch, and CLS."""
        return (self.size // self.patch) ** 2 + 1

    @cached_property
    def patches(self) -> Layer:
        """Embedding of patches: a convolution whose patches do not overlap is a linear layer."""
        return linear_layer("patch", self.channels * self.patch**2, self.encoder.width)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter, trained or not."""
        width, patches = self.encoder.width, self.patches
        return {
            "cls": (width,),
            "positions": (self.tokens, width),
            patches.name: patches.shape,
            patches.bias_name: (width,),
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
        """Return images [batch, C, H, W] as tokens [batch, N, width]; the first is CLS."""
        x = self.patches(params, cut_patches(self._fitted(x), self.patch), fwd)
        cls = params["cls"].expand(x.shape[0], 1, -1)
        return torch.cat([cls, x], dim=1) + params["positions"]

    def padding(self, x: Tensor) -> Tensor | None:
        """Return None, since images have no padding."""
        return None

    @property
    def pooled(self) -> int | None:
        """Number of encoded tokens that `pool` needs."""
        return 1

    def pool(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """Return CLS, [batch, width], of encoded tokens [batch, N, width]."""
        return hidden[:, 0]

    def features(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, tasks: int | None = None
    ) -> Tensor:
        """Return CLS after the final norm, [batch, width]."""
        full = self.backbone_init.all_params(self, params, str(x.device))
        return self.pool(self.encoder(full, self.embed(full, x, fwd), fwd, first=self.pooled))

    def _fitted(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.channels:
            luma = x.new_tensor(_LUMA).view(3, 1, 1)
            x = (x * luma).sum(1, keepdim=True)
        x = resize_images(x, self.size)
        return x.expand(-1, self.channels, -1, -1) if x.shape[1] < self.channels else x


def cut_patches(x: Tensor, patch: int) -> Tensor:
    """Return images [batch, C, H, W] as patches [batch, N, C * patch * patch], row by row.

    Pixels at the right and lower edge that fill no whole patch are left out, as in a convolution.
    """
    batch, channels, height, width = x.shape
    rows, columns = height // patch, width // patch
    cropped = x[..., : rows * patch, : columns * patch]
    grid = cropped.reshape(batch, channels, rows, patch, columns, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def resize_images(x: Tensor, size: int) -> Tensor:
    """Return images [batch, C, H, W] resized bilinearly to `size` x `size` pixels.

    Rows and columns are each multiplied by a fixed matrix, which stays one operation for stacked
    clients.
    """
    if tuple(x.shape[2:]) == (size, size):
        return x
    rows, columns = (_resize_matrix(side, size).to(x.device) for side in x.shape[2:])
    return rows @ x @ columns.t()


@lru_cache(maxsize=32)
def _resize_matrix(old: int, new: int) -> Tensor:
    """Return the weights [new, old] of the old pixels of a line in each new one."""
    pixels = torch.eye(old).view(1, 1, old, old)
    return interpolate(pixels, (new, old), mode="bilinear", antialias=new < old)[0, 0]


# ------------------------------------------------------------------------------------------------
# Text encoder of the BERT type, post-norm (Devlin et al., 2019), such as MiniLM.
# ------------------------------------------------------------------------------------------------


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
