"""Tiny configs of every method, and of settings that keep something between two rounds."""

from __future__ import annotations

from typing import Any

from perdure.methods.registry import KINDS

Values = dict[str, Any]

PROMPTED = ("fed-l2p", "fed-dualp", "pip")
WITHOUT_MOMENTUM = ("scaffold", "fednova")
BASE: Values = {
    "data": {"limit": 200, "test_limit": 60},
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 2},
    "clients": {"count": 5, "per_round": 3, "partition": {"kind": "dirichlet", "alpha": 2.0}},
    "model": {"hidden": [12]},
    "train": {"rounds": 3, "batch_size": 16, "max_steps": 3},
    "runs": {"evaluate_every": 2, "keep_tasks": 2},
}
VIT: Values = {
    **BASE,
    "model": {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4},
    "train": {**BASE["train"], "optimizer": "adam", "lr": 0.02, "max_steps": 2},
}
CONV: Values = {**BASE, "model": {"kind": "conv", "width": 4, "norm": "batch", "dropout": 0.2}}


def method_config(kind: str, engine: str) -> Values:
    """Return a config that a method accepts."""
    values = VIT if kind in PROMPTED else BASE
    if kind not in (*PROMPTED, *WITHOUT_MOMENTUM):
        values = {**values, "train": {**values["train"], "momentum": 0.5}}
    return {**values, "method": {"kind": kind}, "engine": {"kind": engine}}


METHODS = tuple(KINDS)

SETTINGS: dict[str, Values] = {
    "a checkpoint every third round": {
        "train": {**BASE["train"], "rounds": 7}, "runs": {"checkpoint_every": 3},
        "method": {"kind": "scaffold"},
    },
    "no checkpoint of tasks": {"runs": {"keep_tasks": 0}, "method": {"kind": "er"}},
    "growing head": {"model": {"hidden": [12], "head": "growing"}, "method": {"kind": "lwf"}},
    "batch norm and dropout": {**CONV, "method": {"kind": "special", "statistics": "blend"}},
    "augmented images": {**CONV, "data": {**BASE["data"], "augment": ["crop", "flip"]}},
    "missing clients": {
        "clients": {**BASE["clients"], "dropout": 0.4},
        "stream": {**BASE["stream"], "presence": 0.6},
        "method": {"kind": "special", "missing": "carry"},
    },
    "cumulative": {"stream": {**BASE["stream"], "cumulative": True}},
    "pool": {"stream": {"kind": "pool", "tasks": 3, "classes_per_task": 2},
             "method": {"kind": "stamp"}},
    "validation": {
        "data": {**BASE["data"], "validation": 0.2}, "evaluate": {"metrics": ["macro_f1", "ece"]},
    },
    "moments that are kept": {
        "train": {**BASE["train"], "server_lr": 0.03},
        "method": {"kind": "fedadam", "keep_moments": True},
    },
    "schedules": {
        "train": {**BASE["train"], "rounds": [4, 2], "task_decay": 0.5, "server_schedule": "1/k",
                  "schedule": {"kind": "cosine", "floor": 0.1}},
    },
    "secure sums": {"privacy": {"secagg": True}, "method": {"kind": "fot"}},
    "noise": {"privacy": {"clip": 1.0, "noise": 0.1}},
    "local noise": {"privacy": {"clip": 1.0, "noise": 0.1, "mode": "local"}},
    "deferred exchanges": {"method": {"kind": "fot", "closing": False}},
    "noisy sketches": {"method": {"kind": "fot", "sketch_noise": "standard"}},
    "sketched bases": {"method": {"kind": "fedprotip", "bases": "pooled", "transport": "sketch",
                                  "router": "gaussian"}},
    "server projection": {"method": {"kind": "fedprotip", "projection": "server",
                                     "diagnostics": True}},
    "calibrated replay": {"method": {"kind": "er", "with": [{"kind": "calibrate",
                                                             "drift": "memory"}]}},
    "calibrated subspaces": {"method": {"kind": "fot", "with": [{"kind": "calibrate"}]}},
    "three methods": {"method": {"kind": "stamp", "with": [{"kind": "special"},
                                                           {"kind": "fedprox"}]}},
    "private heads": {**VIT, "method": {"kind": "pip", "average_head": "never", "keys": "mean"}},
    "buffered rounds": {"train": {**BASE["train"], "rounds": 5}, "method": {"kind": "late.Late"}},
    "a pull that changes": {
        "train": {**BASE["train"], "lr": 0.037}, "method": {"kind": "late.Rising"},
    },
    "exchanges of every kind": {"method": {"kind": "phased.Phased"}},
}  # fmt: skip
"""By name: what differs from `BASE`."""


def setting_config(name: str, engine: str) -> Values:
    """Return the config of one of `SETTINGS`."""
    return {**BASE, **SETTINGS[name], "engine": {"kind": engine}}
