"""The `model` section of a config."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from perdure.config.section import (
    ByKind,
    ConfigSection,
    NonNegativeInt,
    PositiveInt,
    Probabilities,
    check_plain,
    with_arguments,
)
from perdure.core.registry import installed


class ModelKeys(ConfigSection):
    """Keys of every model."""

    kind: str
    """The network: mlp, conv, alexnet, resnet18-reduced, resnet18, resnet20, resnet32, vit or
    text; or the dotted path of an nn.Module such as mynet.Net."""
    head: Literal["shared", "growing"] | None = None
    """`shared`: one output per class. `growing`: one block of outputs per task. Default: chosen by
    the method; one for all methods of a comparison."""
    init: str | None = None
    """Initial weights: a safetensors file, or a run directory; of a run with the same model and
    method the server's state, too. Default: random."""

    reads_text: ClassVar[bool] = False
    """Whether its inputs are the tokens of a text, which have no mean and no style."""
    takes_prompts: ClassVar[bool] = False
    """Whether it is a transformer that can carry prompts."""

    @property
    def weights_file(self) -> str | None:
        """The file of initial weights; None for backbones, which have pretrained weights."""
        return self.init


class BuiltinKeys(ModelKeys):
    """Keys of the networks that are built in."""

    bias: bool = True
    """Whether layers have a bias; of residual networks, vit and text the head alone."""


class NormKeys(BuiltinKeys):
    """Keys of networks with normalization layers."""

    norm: Literal["batch", "group", "none"] | None = None
    """Normalization layers. Default: batch for residual networks, none for the others."""
    running_stats: bool = True
    """Batch norm keeps running statistics. If false, it uses those of the batch in tests too."""


class MlpModel(NormKeys):
    """A multilayer perceptron.

    Example: `model: {kind: mlp, hidden: [100, 100]}`
    """

    kind: Literal["mlp"] = "mlp"
    hidden: list[PositiveInt] = Field(default=[100, 100])
    """Sizes of the hidden layers."""
    dropout: Probabilities = 0.0
    """Dropout rate of the hidden layers, or one rate for the input and each hidden layer."""


class WidthKeys(NormKeys):
    """Keys of convolutional networks."""

    width: PositiveInt | None = None
    """Channels of the first convolution. Default: conv 16, alexnet 64, resnet18 64,
    resnet18-reduced 20, resnet20 and resnet32 16."""


class ConvModel(WidthKeys):
    """A small convolutional network.

    Example: `model: {kind: conv, width: 8}`
    """

    kind: Literal["conv"] = "conv"
    dropout: Probabilities = 0.0
    """Dropout rate, or one rate for each of the places (conv 3, alexnet 5)."""


class AlexnetModel(WidthKeys):
    """The small AlexNet of the continual-learning literature.

    Example: `model: {kind: alexnet, dropout: [0.2, 0.2, 0.5, 0.5, 0.5]}`
    """

    kind: Literal["alexnet"] = "alexnet"
    dropout: Probabilities = 0.0
    """Dropout rate, or one rate for each of the places (conv 3, alexnet 5)."""


class Resnet18Model(WidthKeys):
    """ResNet-18.

    Example: `model: {kind: resnet18, init: resnet18.safetensors}`
    """

    kind: Literal["resnet18"] = "resnet18"


class Resnet18ReducedModel(WidthKeys):
    """The ResNet-18 with few channels of the continual-learning literature.

    Example: `model: {kind: resnet18-reduced, running_stats: false}`
    """

    kind: Literal["resnet18-reduced"] = "resnet18-reduced"


class Resnet20Model(WidthKeys):
    """ResNet-20 for images of 32x32 pixels.

    Example: `model: {kind: resnet20}`
    """

    kind: Literal["resnet20"] = "resnet20"


class Resnet32Model(WidthKeys):
    """ResNet-32 for images of 32x32 pixels.

    Example: `model: {kind: resnet32}`
    """

    kind: Literal["resnet32"] = "resnet32"


class BackboneKeys(BuiltinKeys):
    """Keys of pretrained transformers."""

    takes_prompts: ClassVar[bool] = True

    init: str | None = None
    """Pretrained weights: a folder with a Hugging Face checkpoint, or its name on the hub. Default:
    the bundled (vit) or installed (text) weights. `random`: a vit that is not pretrained."""
    train_layers: NonNegativeInt | None = None
    """Blocks that are trained, counted from the last; the others are frozen and never sent.
    Default: all."""

    @property
    def weights_file(self) -> str | None:
        """Return None, since a backbone reads its pretrained weights itself."""
        return None


class VitModel(BackboneKeys):
    """A vision transformer.

    Example: `model: {kind: vit, train_layers: 1}`
    """

    kind: Literal["vit"] = "vit"
    width: PositiveInt | None = None
    """Size of a token; only with `init: random`. Default: 128."""
    depth: PositiveInt | None = None
    """Number of blocks; only with `init: random`. Default: 6."""
    heads: PositiveInt | None = None
    """Attention heads per block; only with `init: random`. Default: 4."""
    patch: PositiveInt | None = None
    """Height and width of a patch in pixels; only with `init: random`. Default: 7."""

    @model_validator(mode="after")
    def _shape_of_random_weights_alone(self) -> VitModel:
        for key in ("width", "depth", "heads", "patch"):
            value = getattr(self, key)
            if value is not None and self.init != "random":
                expected = "null, since the pretrained weights determine it (model.init)"
                raise ValueError(f"{key}: must be {expected}, got {value!r}")
        return self


class TextModel(BackboneKeys):
    """A transformer that encodes texts.

    Example: `model: {kind: text, max_tokens: 32}`
    """

    kind: Literal["text"] = "text"
    reads_text: ClassVar[bool] = True
    max_tokens: PositiveInt = 64
    """Maximum number of tokens of a text; longer ones are cut."""


class ModuleModel(ModelKeys):
    """Any nn.Module: a class or function by its dotted path, and the arguments that make one.

    Keys that are not listed here are arguments; `auto` as a value is the number of classes.

    Example: `model: {kind: mynet.Net, hidden: 64, num_classes: auto}`
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": True})

    kind: str = Field(json_schema_extra={"pattern": r"\."})
    head_layer: str | None = None
    """Path of its head, a Linear layer such as `fc`. `none`: its output is the input of a new head.
    Default: the last Linear layer that it calls."""
    frozen: list[str] = Field(default=[])
    """Parameters that are not trained and not sent: names, modules or patterns such as `layer1` or
    `*.bn?.*`. A batch norm whose parameters are frozen keeps its running statistics."""
    arguments: dict[str, Any] = Field(default={})
    """Arguments that have the name of a key, such as `init`; others may be given as keys."""

    @model_validator(mode="before")
    @classmethod
    def _other_keys_are_arguments(cls, values: Any) -> Any:
        return with_arguments(values, cls.model_fields)

    @field_validator("arguments")
    @classmethod
    def _plain(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        return check_plain(arguments)

    @property
    def weights_file(self) -> str | None:
        """Return None, since the weights are read into the module, frozen ones included."""
        return None


MODEL_GROUP = "perdure.models"
"""Entry-point group of packages that add names of modules."""
MODULES: dict[str, str] = {}
"""Modules that perdure includes, in perdure.models.modules: dotted paths by name."""


def installed_modules() -> dict[str, str]:
    """Return the dotted paths of modules of perdure and of installed packages, by name."""
    points = installed(MODEL_GROUP)
    return {name: each[0].value.replace(":", ".") for name, each in points.items()} | MODULES


ModelConfig = Annotated[
    MlpModel
    | ConvModel
    | AlexnetModel
    | Resnet18ReducedModel
    | Resnet18Model
    | Resnet20Model
    | Resnet32Model
    | VitModel
    | TextModel
    | ModuleModel,
    ByKind(others=installed_modules),
]
