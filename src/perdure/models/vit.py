"""Vision transformer, pre-norm, as in ViT-B/16 (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn.functional import interpolate

from perdure.config.section import PositiveInt
from perdure.core.errors import bad_value
from perdure.core.trees import Tensors
from perdure.models.backbones import BackboneModel, trained_blocks
from perdure.models.layers import Body, BodySetup, Layer, linear_layer, set_facts
from perdure.models.modules.plain import Image, check_image
from perdure.models.ops import ForwardPass
from perdure.models.pretrained import RANDOM_START
from perdure.models.transformer import Encoder
from perdure.models.weights import RANDOM_INIT, BackboneInit

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


# ---- The kind of model


class VitModel(BackboneModel):
    """A vision transformer.

    Example: `model: {kind: vit, train_layers: 1}`
    """

    width: PositiveInt | None = None
    """Size of a token; only with `init: random`. Default: 128."""
    depth: PositiveInt | None = None
    """Number of blocks; only with `init: random`. Default: 6."""
    heads: PositiveInt | None = None
    """Attention heads per block; only with `init: random`. Default: 4."""
    patch: PositiveInt | None = None
    """Height and width of a patch in pixels; only with `init: random`. Default: 7."""

    weights_type: ClassVar[str] = "vit"
    scales_inputs: ClassVar[bool] = False

    @model_validator(mode="after")
    def _shape_of_random_weights_alone(self) -> VitModel:
        for key in ("width", "depth", "heads", "patch"):
            value = getattr(self, key)
            if value is not None and self.init != RANDOM_START:
                expected = "null, since the pretrained weights determine it (model.init)"
                raise ValueError(f"{key}: must be {expected}, got {value!r}")
        return self

    def make_body(self, shape: tuple[int, ...], classes: int, setup: BodySetup) -> Vit:
        """Return the vision transformer without its head."""
        image = check_image(self, shape)
        pretrained = self.pretrained(setup.card)
        if pretrained is None:
            return self._random(image)
        blocks = trained_blocks(self.train_layers, pretrained.integer("num_hidden_layers"))
        patch = pretrained.integer("patch_size", 16)
        vit = Vit(
            pretrained.encoder(pre_norm=True),
            pretrained.integer("num_channels", 3),
            pretrained.integer("image_size", 224, minimum=patch),
            patch,
            BackboneInit(pretrained, blocks),
        )
        if setup.card is None:
            vit.frozen()  # so that bad weights are refused before training
        return vit

    def _random(self, image: Image) -> Vit:
        channels, height, width = image
        size, heads, depth = self.width or 128, self.heads or 4, self.depth or 6
        patch = self.patch or 7
        if size % heads:
            raise bad_value("model.heads", heads, f"a divisor of model.width ({size})")
        side = -(-max(height, width) // patch) * patch
        encoder = Encoder(size, depth, heads, 4 * size, pre_norm=True)
        start = BackboneInit(None, trained_blocks(self.train_layers, depth))
        return Vit(encoder, channels, side, patch, start)
