"""Images: resizing, channels, and random changes of those that clients train on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import interpolate

from perdure.config import AugmentConfig, DataConfig
from perdure.config.section import Fraction, PositiveInt
from perdure.core.errors import UserError, bad_value
from perdure.core.registry import Registry
from perdure.data.examples import Source

# ---- Resizing images, and converting them between one and three channels

log = logging.getLogger(__name__)

_CHUNK = 2048
_LUMA = (0.299, 0.587, 0.114)


def resize(x: Tensor, height: int, width: int) -> Tensor:
    """Return images [N, C, H, W] in another size and of their type, by bilinear interpolation."""
    if tuple(x.shape[2:]) == (height, width):
        return x
    smaller = height < x.shape[2] or width < x.shape[3]  # enlarging needs no smoothing
    out = torch.empty((x.shape[0], x.shape[1], height, width), dtype=x.dtype)
    for start in range(0, x.shape[0], _CHUNK):
        chunk = x[start : start + _CHUNK].float()
        chunk = interpolate(chunk, (height, width), mode="bilinear", antialias=smaller)
        out[start : start + _CHUNK] = _as_type(chunk, x.dtype)
    return out


def _as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if dtype == torch.float32 else x.round_().clamp_(0, 255).to(torch.uint8)


def convert_channels(x: Tensor, channels: int) -> Tensor:
    """Return images [N, C, H, W] with 1 or 3 channels; color becomes its brightness.

    Raises:
        UserError: The images have neither 1 nor 3 channels.

    """
    if x.shape[1] == channels:
        return x
    if x.shape[1] == 1:
        return x.repeat(1, channels, 1, 1)
    if (x.shape[1], channels) != (3, 1):
        raise bad_value("data.channels", channels, f"null for images with {x.shape[1]} channels")
    weights = torch.tensor(_LUMA).view(1, 3, 1, 1)
    chunks = [
        _as_type((chunk.float() * weights).sum(1, keepdim=True), x.dtype)
        for chunk in torch.split(x, _CHUNK)
    ]
    return torch.cat(chunks)


def fit_images(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return images [N, C, H, W] with another shape (C, H, W)."""
    channels, height, width = shape
    if channels < x.shape[1]:  # resize fewer channels
        return resize(convert_channels(x, channels), height, width)
    return convert_channels(resize(x, height, width), channels)


def resize_source(source: Source, size: int | None, channels: int | None) -> Source:
    """Return the source with images of another size."""
    if len(source.shape) != 3 or (size is None and channels is None):
        return source
    old = source.shape
    new = (channels or old[0], size or old[1], size or old[2])
    if new == old:
        return source
    log.info("%s: images of %s resized to %s", source.name, _describe(old), _describe(new))
    return _with_shape(source, new)


def _with_shape(source: Source, shape: tuple[int, ...]) -> Source:
    return source.map(lambda part: replace(part, x=fit_images(part.x, shape)))


def unify_shapes(sources: Sequence[Source]) -> list[Source]:
    """Return the sources of one stream with one shape: the largest size and most channels."""
    shapes = {source.shape for source in sources}
    if len({source.train.x.dtype for source in sources}) > 1:
        shown = ", ".join(f"{s.name} {s.train.x.dtype}".replace("torch.", "") for s in sources)
        raise UserError(f"stream.domains: must be sources of one type of values, got {shown}")
    if len({source.feature_names for source in sources}) > 1:
        raise UserError("stream.domains: must be tables with the same feature columns in one order")
    if len(shapes) == 1:
        return list(sources)
    if any(len(shape) != 3 for shape in shapes):
        shown = ", ".join(f"{source.name} {_describe(source.shape)}" for source in sources)
        raise UserError(f"stream.domains: must be all images, or inputs of one size, got {shown}")
    shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    resized = [f"{s.name} from {_describe(s.shape)}" for s in sources if s.shape != shape]
    log.info("images are resized to %s: %s", _describe(shape), ", ".join(resized))
    return [s if s.shape == shape else _with_shape(s, shape) for s in sources]


def _describe(shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return f"{shape[0]} features"
    if len(shape) == 2:
        return f"{shape[0]} channels of {shape[1]} values"
    return f"{shape[1]}x{shape[2]} with {shape[0]} channel{'s' if shape[0] > 1 else ''}"


# ---- Random changes of training images, for a batch or a stack of batches at once

AUGMENTATIONS: Registry[AugmentConfig] = Registry(
    key="data.augment.kind",
    base=AugmentConfig,
    base_name="perdure.config.AugmentConfig",
    group="perdure.augmentations",
    builtin={
        "crop": "perdure.data.images.CropAugment",
        "flip": "perdure.data.images.FlipAugment",
    },
)


class CropAugment(AugmentConfig):
    """A window of the image's size, anywhere in the image with a black border."""

    padding: PositiveInt = 4
    """Width of the border in pixels."""

    draws: ClassVar[int] = 2

    def apply(self, images: Tensor, draws: Tensor, black: Tensor) -> Tensor:
        """Return a window of each image, at the drawn place."""
        return crop(images, draws, self.padding, black)


class FlipAugment(AugmentConfig):
    """The image mirrored from left to right."""

    probability: Fraction = 0.5
    """Fraction of the images that are mirrored."""

    draws: ClassVar[int] = 1

    def apply(self, images: Tensor, draws: Tensor, black: Tensor) -> Tensor:
        """Return the images, mirrored where the draw is below the probability."""
        return flip(images, draws[:, 0], self.probability)


@dataclass(frozen=True)
class Augmentation:
    """The changes of `data.augment`, in their order.

    The random numbers are drawn by the caller, so that they depend neither on the engine nor on the
    number of clients that are trained at once.
    """

    changes: tuple[AugmentConfig, ...]

    @property
    def draws(self) -> int:
        """Random numbers per image."""
        return sum(change.draws for change in self.changes)

    def apply(self, x: Tensor, draws: Tensor, black: Tensor) -> Tensor:
        """Return the changed images.

        Args:
            x: float [..., C, H, W].
            draws: float [..., `self.draws`], uniform in [0, 1).
            black: float [C]: value of a black pixel, which a border has.

        """
        images, numbers = x.flatten(0, -4), draws.to(x.device).flatten(0, -2)
        for change in self.changes:
            own, numbers = numbers[:, : change.draws], numbers[:, change.draws :]
            images = change.apply(images, own, black)
        return images.view(x.shape)


def make_augmentation(config: DataConfig) -> Augmentation | None:
    """Return the changes of a `data` section. None if there are none."""
    return Augmentation(tuple(config.augment)) if config.augment else None


def crop(images: Tensor, draws: Tensor, padding: int, black: Tensor) -> Tensor:
    """Return a window of each image with a border.

    Args:
        images: float [N, C, H, W].
        draws: float [N, 2] in [0, 1): position of the window, vertical and horizontal.
        padding: Width of the border.
        black: float [C]: value of the border.

    """
    count, _, height, width = images.shape
    inside = F.pad(torch.ones_like(images[:1, :1], dtype=torch.bool), (padding,) * 4)
    bordered = torch.where(inside, F.pad(images, (padding,) * 4), black[:, None, None])
    first = (draws * (2 * padding + 1)).long()
    rows = first[:, 0, None] + torch.arange(height, device=images.device)
    columns = first[:, 1, None] + torch.arange(width, device=images.device)
    number = torch.arange(count, device=images.device)[:, None, None]
    chosen = bordered[number, :, rows[:, :, None], columns[:, None, :]]  # [N, H, W, C]
    return chosen.permute(0, 3, 1, 2)


def flip(images: Tensor, draws: Tensor, probability: float) -> Tensor:
    """Return the images [N, C, H, W], mirrored where a draw [N] is below the probability."""
    mirrored = (draws < probability)[:, None, None, None]
    return torch.where(mirrored, images.flip(-1), images)
