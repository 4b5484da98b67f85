"""Vision transformer, pre-norm, as in ViT-B/16 (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from perdure.core.trees import Tensors
from perdure.models.backbone_init import RANDOM_INIT, BackboneInit
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import Layer, linear_layer
from perdure.models.transformer import NO_PREFIXES, Encoder, Prefixes

_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Vit:
    """Patches of an image and a CLS token, through an encoder; the CLS token is the feature.

    Images of any size and with one or three channels come in: `embed` brings them to what the
    model was made for, so that data stay at their own size in memory.
    """

    encoder: Encoder
    channels: int
    size: int
    """Pixels a side that the model was made for."""
    patch: int
    start: BackboneInit = RANDOM_INIT

    @property
    def feature_size(self) -> int:
        """Width of the tokens."""
        return self.encoder.width

    @property
    def tokens(self) -> int:
        """Tokens of an image: one a patch, and CLS."""
        return (self.size // self.patch) ** 2 + 1

    @cached_property
    def patches(self) -> Layer:
        """The embedding of a patch: a convolution whose steps do not overlap is a linear layer."""
        return linear_layer("patch", self.channels * self.patch**2, self.encoder.width)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter, trained or not."""
        width, patches = self.encoder.width, self.patches
        return {
            "cls": (width,),
            "positions": (self.tokens, width),
            patches.name: patches.shape,
            patches.bias_name: (width,),
            **self.encoder.shapes,
        }

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every weight matrix that is trained, in the order of the forward pass."""
        return self.start.trained_layers(self, (self.patches,))

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """First parameters of what is trained: pretrained, or random."""
        return self.start.trained(self, generator), {}

    def frozen(self, device: torch.device | str = "cpu") -> Tensors:
        """All parameters as they start, as constants: for prompts on a frozen backbone."""
        return self.start.constants(self, str(device))

    def embed(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Images [batch, C, H, W] as tokens [batch, N, width]: CLS first, positions added."""
        x = self.patches(params, cut_patches(self._fitted(x), self.patch), fwd)
        cls = params["cls"].expand(len(x), 1, -1)
        return torch.cat([cls, x], dim=1) + params["positions"]

    def padding(self, x: Tensor) -> Tensor | None:
        """Images have no padding."""
        return None

    def encode(
        self,
        params: Tensors,
        tokens: Tensor,
        fwd: ForwardPass,
        prefixes: Prefixes = NO_PREFIXES,
        padding: Tensor | None = None,
        first: int | None = None,
    ) -> Tensor:
        """Tokens after all blocks and the final norm, [batch, N, width]; the `first` ones alone."""
        return self.encoder(params, tokens, fwd, prefixes, padding, first)

    @property
    def pooled(self) -> int | None:
        """Encoded tokens that `pool` needs."""
        return 1

    def pool(self, hidden: Tensor, padding: Tensor | None = None) -> Tensor:
        """The feature among encoded tokens: CLS."""
        return hidden[:, 0]

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """CLS after the final norm."""
        full = self.start.full(self, params, str(x.device))
        return self.pool(self.encode(full, self.embed(full, x, fwd), fwd, first=self.pooled))

    def _fitted(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.channels:
            luma = x.new_tensor(_LUMA).view(3, 1, 1)
            x = (x * luma).sum(1, keepdim=True)
        x = resize_images(x, self.size)
        return x.expand(-1, self.channels, -1, -1) if x.shape[1] < self.channels else x


def cut_patches(x: Tensor, patch: int) -> Tensor:
    """Images [batch, C, H, W] as patches [batch, N, C * patch * patch], row after row.

    Pixels at the end of a line that make no whole patch are left out, as a convolution would.
    """
    batch, channels, height, width = x.shape
    rows, columns = height // patch, width // patch
    whole = x[..., : rows * patch, : columns * patch]
    grid = whole.reshape(batch, channels, rows, patch, columns, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def resize_images(x: Tensor, size: int) -> Tensor:
    """Images at `size` pixels a side, bilinear.

    Rows and columns are each a product with a fixed matrix, which stays one operation when clients
    are stacked.
    """
    if tuple(x.shape[2:]) == (size, size):
        return x
    rows, columns = (_resizing(side, size).to(x.device) for side in x.shape[2:])
    return rows @ x @ columns.t()


@lru_cache(maxsize=32)
def _resizing(old: int, new: int) -> Tensor:
    """[new, old]: how each new pixel of a line is mixed from the old ones."""
    pixels = torch.eye(old).view(1, 1, old, old)
    return interpolate(pixels, (new, old), mode="bilinear", antialias=new < old)[0, 0]
