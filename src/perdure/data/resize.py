"""Images of different sizes and channels, brought to one shape."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from perdure.core.errors import UserError
from perdure.data.source import Examples, Source

log = logging.getLogger(__name__)

_CHUNK = 2048
_LUMA = (0.299, 0.587, 0.114)


def resize(x: Tensor, height: int, width: int) -> Tensor:
    """uint8 images [N, C, H, W] at another size, bilinear, in chunks so that memory stays small."""
    if tuple(x.shape[2:]) == (height, width):
        return x
    smaller = height < x.shape[2] or width < x.shape[3]  # only then is there anything to smooth
    out = torch.empty((x.shape[0], x.shape[1], height, width), dtype=torch.uint8)
    for start in range(0, x.shape[0], _CHUNK):
        part = x[start : start + _CHUNK].float()
        part = interpolate(part, (height, width), mode="bilinear", antialias=smaller)
        out[start : start + _CHUNK] = part.round_().clamp_(0, 255).to(torch.uint8)
    return out


def recolor(x: Tensor, channels: int) -> Tensor:
    """Images with 1 or 3 channels: grey is repeated, colour becomes its brightness."""
    if x.shape[1] == channels:
        return x
    if x.shape[1] == 1:
        return x.repeat(1, channels, 1, 1)
    weights = torch.tensor(_LUMA).view(1, 3, 1, 1)
    parts = [
        (part.float() * weights).sum(1, keepdim=True).round_().to(torch.uint8)
        for part in torch.split(x, _CHUNK)
    ]
    return torch.cat(parts)


def fit(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images in the shape (C, H, W)."""
    channels, height, width = shape
    if channels < x.shape[1]:  # resize the fewer channels
        return resize(recolor(x, channels), height, width)
    return recolor(resize(x, height, width), channels)


def fit_source(source: Source, size: int | None, channels: int | None) -> Source:
    """The source with images of `size` pixels a side and `channels` channels, where given."""
    if len(source.shape) != 3 or (size is None and channels is None):
        return source
    old = source.shape
    new = (channels or old[0], size or old[1], size or old[2])
    if new == old:
        return source
    log.info("%s: images of %s brought to %s", source.name, _say(old), _say(new))
    return _with_shape(source, new)


def _with_shape(source: Source, shape: tuple[int, ...]) -> Source:
    train, test = source.train, source.test
    return replace(
        source,
        train=Examples(fit(train.x, shape), train.y),
        test=Examples(fit(test.x, shape), test.y),
    )


def unify(sources: Sequence[Source]) -> list[Source]:
    """Bring the sources of one stream to one shape: the largest size and the most channels."""
    shapes = {source.shape for source in sources}
    if len(shapes) == 1:
        return list(sources)
    if any(len(shape) != 3 for shape in shapes):
        said = ", ".join(f"{source.name} {_say(source.shape)}" for source in sources)
        raise UserError(f"stream.domains: must be all images, or texts of one size, got {said}")
    shape = tuple(max(sizes) for sizes in zip(*shapes, strict=True))
    said = ", ".join(f"{s.name} from {_say(s.shape)}" for s in sources if s.shape != shape)
    log.info("images of different shapes are brought to %s: %s", _say(shape), said)
    return [s if s.shape == shape else _with_shape(s, shape) for s in sources]


def _say(shape: tuple[int, ...]) -> str:
    if len(shape) == 1:
        return f"{shape[0]} features"
    return f"{shape[1]}x{shape[2]} with {shape[0]} channel{'s' if shape[0] > 1 else ''}"
