"""Build the body that a config describes, or say why it cannot be built."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from perdure.config import ModelConfig
from perdure.config import model as kinds
from perdure.core.errors import bad_value
from perdure.models.adapter.build import BuiltinBody, ModuleSetup, make_module_body
from perdure.models.backbones import make_text, make_vit
from perdure.models.layers import Body, InitScheme
from perdure.models.modules.conv import Image, ImageTooSmall, alexnet, small_conv
from perdure.models.modules.mlp import Norm, NormKind, mlp
from perdure.models.modules.resnet import cifar_resnet, reduced_resnet18, resnet18

_Conv = kinds.ConvModel | kinds.AlexnetModel
_Resnet = (
    kinds.Resnet18Model | kinds.Resnet18ReducedModel | kinds.Resnet20Model | kinds.Resnet32Model
)
BuiltinModel = kinds.MlpModel | _Conv | _Resnet
"""Models that are plain modules."""
_SCHEMES: dict[str, InitScheme] = {
    "resnet18": "fan_out", "resnet20": "fan_in", "resnet32": "fan_in",
}  # fmt: skip
"""Distribution of the initial weights by kind, if it is not PyTorch's default."""


def make_body(
    config: ModelConfig,
    shape: tuple[int, ...],
    backbone: dict[str, Any] | None = None,
    classes: int = 0,
    setup: ModuleSetup = ModuleSetup(),  # noqa: B008
) -> Body:
    """Return the body of a config."""
    if isinstance(config, kinds.ModuleModel):
        return make_module_body(config, shape, classes, setup)
    if isinstance(config, kinds.TextModel):
        return make_text(config, shape[0], backbone)
    if len(shape) != 3 and not isinstance(config, kinds.MlpModel):
        size = " x ".join(str(length) for length in shape)
        expected = f"mlp, since an input has {size} features and is not an image"
        raise bad_value("model.kind", config.kind, expected)
    if isinstance(config, kinds.VitModel):
        return make_vit(config, (shape[0], shape[1], shape[2]), backbone)
    return _builtin(config, shape)


def _builtin(config: BuiltinModel, shape: tuple[int, ...]) -> BuiltinBody:
    with torch.device("meta"):
        module = builtin_module(config, shape)
    return BuiltinBody(module, shape, _scheme(config))


def _scheme(config: BuiltinModel) -> InitScheme:
    """Return the distribution of the initial weights.

    Without norms He's scheme makes the signal of a residual network grow with every block, so the
    weights then have PyTorch's smaller default.
    """
    return "uniform" if config.norm == "none" else _SCHEMES.get(config.kind, "uniform")


def builtin_module(config: BuiltinModel, shape: tuple[int, ...]) -> nn.Module:
    """Return the module of a config; its output is the head's input."""
    if isinstance(config, kinds.MlpModel):
        return _mlp(config, math.prod(shape))
    image = (shape[0], shape[1], shape[2])
    return _conv(config, image) if isinstance(config, _Conv) else _resnet(config, image)


def _mlp(config: kinds.MlpModel, inputs: int) -> nn.Module:
    hidden = tuple(config.hidden)
    rates = _rates(config, len(hidden) + 1)
    if not isinstance(config.dropout, list):  # inputs are dropped only if a list says so
        rates = (0.0, *rates[1:])
    return mlp(inputs, hidden, rates, _norm(config, "none"), config.bias)


def _conv(config: _Conv, image: Image) -> nn.Module:
    norm = _norm(config, "none")
    try:
        if isinstance(config, kinds.AlexnetModel):
            return alexnet(image, config.width or 64, _rates(config, 5), norm, config.bias)
        return small_conv(image, config.width or 16, _rates(config, 3), norm, config.bias)
    except ImageTooSmall:
        expected = f"a model for images as small as {image[1]}x{image[2]}, such as mlp"
        raise bad_value("model.kind", config.kind, expected) from None


def _resnet(config: _Resnet, image: Image) -> nn.Module:
    norm = _norm(config, "batch")
    if config.kind == "resnet18":
        return resnet18(image, config.width or 64, norm)
    if config.kind == "resnet18-reduced":
        return reduced_resnet18(image, config.width or 20, norm)
    depth = int(config.kind.removeprefix("resnet"))
    return cifar_resnet(image, config.width or 16, norm, depth)


def _rates(config: kinds.MlpModel | _Conv, count: int) -> tuple[float, ...]:
    """Return the rates of the model's `count` dropout layers."""
    rates = config.dropout
    if not isinstance(rates, list):
        return (rates,) * count
    if len(rates) != count:
        expected = f"one value or a list of {count} for model.kind {config.kind}"
        raise bad_value("model.dropout", rates, expected)
    return tuple(rates)


def _norm(config: BuiltinModel, default: NormKind) -> Norm:
    return Norm(config.norm or default, config.running_stats)
