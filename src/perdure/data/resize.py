"""Resizing images, and converting them between one and three channels."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from perdure.core.errors import UserError, bad_value
from perdure.data.source import Source

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
    """Return the source with images of another size.

    Args:
        source: The source. Anything but images is returned unchanged.
        size: Height and width in pixels. If None, they do not change.
        channels: Number of channels, 1 or 3. If None, it does not change.
    """
    if len(source.shape) != 3 or (size is None and channels is None):
        return source
    old = source.shape
    new = (channels or old[0], size or old[1], size or old[2])
    if new == old:
        return source
    log.info("%s: images of %s resized to %s", source.name, _describe(old), _describe(new))
    return _with_shape(source, new)


def _with_shape(source: Source, shape: tuple[int, ...]) -> Source:
    train, test = source.train, source.test
    return replace(
        source,
        train=replace(train, x=fit_images(train.x, shape)),
        test=replace(test, x=fit_images(test.x, shape)),
    )


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
