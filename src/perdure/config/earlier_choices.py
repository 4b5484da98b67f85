"""What methods chose for runs whose config.yaml does not record it.

Until version 0.3 a config.yaml held null where the method chose the head, the outputs in the loss,
the weights or the server's step. This table keeps these choices, so that such runs are resumed as
they were started even if a method chooses differently today.
"""

from __future__ import annotations

from typing import Any

from perdure.config.root import Config
from perdure.config.stream import STREAMS

LEFT_TO_METHOD = {
    "model.head": "shared",
    "train.outputs": "all",
    "train.weighting": "samples",
    "train.server_lr": 1.0,
    "train.server_schedule": "constant",
}
"""Keys whose value a method may choose, and their defaults."""

_GROWING = {"model.head": "growing"}
_UNIFORM = {"train.weighting": "uniform"}
_PROMPTS = {"train.outputs": "task", **_UNIFORM}
_CHOICES: dict[str, dict[str, Any]] = {
    "fedavg": {}, "fedprox": {}, "fednova": {}, "fedavgm": {}, "fedomg": {}, "ewc": {}, "lwf": {},
    "flwf-2t": {}, "er": {}, "stamp": {}, "calibrate": {}, "fedncm": {}, "fedlda": {},
    "fedridge": {}, "gpm": _GROWING, "fedprotip": _GROWING, "fot": {**_GROWING, **_UNIFORM},
    "special": {**_UNIFORM, "train.server_schedule": "1/k"}, "special-c": _UNIFORM,
    "scaffold": _UNIFORM, "fedadam": {"train.server_lr": 0.03},
    "fedyogi": {"train.server_lr": 0.03}, "fed-dualp": _PROMPTS, "fed-l2p": _PROMPTS,
    "pip": _PROMPTS,
}  # fmt: skip
"""By method what it chose (the head on split streams)."""


def with_earlier_choices(config: Config) -> Config:
    """Return a saved config with the choices of its method filled in where it has null.

    A config of a custom method or stream is returned unchanged.
    """
    kinds = [part.get("kind") for part in (config.method, *(config.method.get("with") or ()))]
    if not (STREAMS.is_builtin(config.stream.kind) and all(kind in _CHOICES for kind in kinds)):
        return config
    for key, value in _choices(config, kinds).items():
        section, name = key.split(".")
        values = getattr(config, section)
        if getattr(values, name) is None:
            changed = values.model_copy(update={name: value})
            config = config.model_copy(update={section: changed})
    return config


def _choices(config: Config, kinds: list[Any]) -> dict[str, Any]:
    choices = LEFT_TO_METHOD | {key: v for kind in kinds for key, v in _CHOICES[kind].items()}
    if config.stream.kind != "split":
        choices["model.head"] = LEFT_TO_METHOD["model.head"]
    if "pip" in kinds and config.method.get("weighted", True):
        choices["train.weighting"] = "samples"
    if config.privacy.clip is not None:
        choices["train.weighting"] = "uniform"
    if (config.model.head or choices["model.head"]) == "growing":
        choices["train.outputs"] = "task"
    return choices
