"""The kinds of models by name."""

from __future__ import annotations

from perdure.config.model import ModelConfig
from perdure.core.registry import Registry

MODELS: Registry[ModelConfig] = Registry(
    key="model.kind",
    base=ModelConfig,
    base_name="perdure.config.ModelConfig",
    group="perdure.models",
    others="perdure.models.adapter.build.ModuleModel",
    builtin={
        "mlp": "perdure.models.modules.mlp.MlpModel",
        "conv": "perdure.models.modules.conv.ConvModel",
        "alexnet": "perdure.models.modules.conv.AlexnetModel",
        "resnet18-reduced": "perdure.models.modules.resnet.Resnet18ReducedModel",
        "resnet18": "perdure.models.modules.resnet.Resnet18Model",
        "resnet20": "perdure.models.modules.resnet.Resnet20Model",
        "resnet32": "perdure.models.modules.resnet.Resnet32Model",
        "vit": "perdure.models.vit.VitModel",
        "text": "perdure.models.text_encoder.TextModel",
    },
)
"""All other kinds are dotted paths of nn.Modules, or names that installed packages give them."""
