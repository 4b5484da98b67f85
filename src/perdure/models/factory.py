"""The body that a config asks for, or the sentence that says why it cannot be had."""

from __future__ import annotations

import math
from typing import Any

from perdure.config import ModelConfig
from perdure.core.errors import bad_value
from perdure.models.backbones import make_text, make_vit
from perdure.models.conv import ConvNet, alexnet, small_conv
from perdure.models.layers import Body, Norm, NormKind
from perdure.models.mlp import Mlp
from perdure.models.resnet import ResNet, cifar_resnet, reduced_resnet18, resnet18

_Image = tuple[int, int, int]


def make_body(
    config: ModelConfig, shape: tuple[int, ...], backbone: dict[str, Any] | None = None
) -> Body:
    """The body for inputs of a shape: (channels, height, width) or (features,).

    backbone: the card of the checkpoint that a trained model was built on.
    """
    if config.kind == "mlp":
        return _mlp(config, shape)
    if config.kind == "text":
        return make_text(config, shape[0], backbone)
    if len(shape) != 3:
        allowed = f"mlp, since the inputs are {shape[0]} features a row and not images"
        raise bad_value("model.kind", config.kind, allowed)
    image = (shape[0], shape[1], shape[2])
    if config.kind == "vit":
        return make_vit(config, image, backbone)
    return _conv(config, image) if config.kind in {"conv", "alexnet"} else _resnet(config, image)


def _mlp(config: ModelConfig, shape: tuple[int, ...]) -> Mlp:
    hidden = tuple(config.hidden)
    rates = _rates(config, len(hidden) + 1)
    if not isinstance(config.dropout, list):  # inputs are dropped only if a list says so
        rates = (0.0, *rates[1:])
    return Mlp(math.prod(shape), hidden, rates, _norm(config, "none"), config.bias)


def _conv(config: ModelConfig, image: _Image) -> ConvNet:
    norm = _norm(config, "none")
    if config.kind == "alexnet":
        net = alexnet(image, config.width or 64, _rates(config, 5), norm, config.bias)
    else:
        net = small_conv(image, config.width or 16, _rates(config, 3), norm, config.bias)
    if 0 in net.grid:
        allowed = f"a model for images as small as {image[1]}x{image[2]}, such as mlp"
        raise bad_value("model.kind", config.kind, allowed)
    return net


def _resnet(config: ModelConfig, image: _Image) -> ResNet:
    if any(_rates(config, 1)):
        raise bad_value("model.dropout", config.dropout, f"0 for model.kind {config.kind}")
    norm = _norm(config, "batch")
    if config.kind == "resnet18":
        return resnet18(image, config.width or 64, norm)
    if config.kind == "resnet18-reduced":
        return reduced_resnet18(image, config.width or 20, norm)
    depth = int(config.kind.removeprefix("resnet"))
    return cifar_resnet(image, config.width or 16, norm, depth)


def _rates(config: ModelConfig, places: int) -> tuple[float, ...]:
    """The dropout rate of each place."""
    rates = config.dropout
    if not isinstance(rates, list):
        return (rates,) * places
    if len(rates) != places:
        allowed = f"one value or a list of {places} for model.kind {config.kind}"
        raise bad_value("model.dropout", rates, allowed)
    return tuple(rates)


def _norm(config: ModelConfig, usual: NormKind) -> Norm:
    return Norm(config.norm or usual, config.running_stats)
