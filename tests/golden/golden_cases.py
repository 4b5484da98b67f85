"""Small runs of every method on the serial engine, and how their results are recorded.

Every option that matters is written out, so that a changed default does not change a case. A
method of the registry that no case names has a plain case, with its defaults.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from typing import Any

import torch

import perdure
from perdure.methods.registry import KINDS
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream

Values = dict[str, Any]

DATA = {"source": "digits", "limit": 260, "test_limit": 120}
CLIENTS = {"count": 4, "per_round": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}}
TRAIN = {"rounds": 2, "local_epochs": 2, "batch_size": 16, "lr": 0.05, "outputs": "all"}
MLP: Values = {
    "seed": 3,
    "data": DATA,
    "stream": {"kind": "permuted", "tasks": 3},
    "clients": CLIENTS,
    "model": {"kind": "mlp", "hidden": [24, 24]},
    "train": TRAIN,
    "engine": {"kind": "serial"},
}
CONV: Values = {
    **MLP,
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 3},
    "model": {"kind": "conv", "width": 4, "norm": "batch", "head": "growing"},
    "train": {**TRAIN, "max_steps": 3, "lr": 0.02, "outputs": "task"},
}
VIT: Values = {
    **MLP,
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 3},
    "clients": {"count": 3, "per_round": 3, "partition": {"kind": "classes", "fraction": 0.6}},
    "model": {
        "kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4,
        "head": "shared",
    },
    "train": {"rounds": 2, "optimizer": "adam", "lr": 0.02, "batch_size": 32, "max_steps": 2},
}  # fmt: skip

FOT = {
    "kind": "fot", "threshold": 0.9, "threshold_increment": 0.01, "rank_rule": "paper",
    "sketch_ratio": 2.0, "layers": "all", "unprotected": "frozen", "freeze_first": False,
    "train_norms": False, "sketch_noise": "none", "closing": True,
}  # fmt: skip
FEDPROTIP = {
    "kind": "fedprotip", "threshold": 0.6, "threshold_increment": 0.001, "rank_rule": "gpm",
    "max_columns": 64, "max_examples": 64, "projection": "local", "routing": "sample",
    "space_rank": 3, "bases": "union", "router": "references", "pool_references": False,
    "drop_first": False, "references": "moments", "transport": "bases", "sketch_size": 32,
    "frozen": [], "diagnostics": False,
}  # fmt: skip
SPECIAL = {
    "kind": "special", "lambda": 0.1, "auto_lambda": False,
    "reach": 4.0, "missing": "leave_out", "statistics": "average",
}  # fmt: skip
EWC = {
    "kind": "ewc", "lambda": 100.0, "anchor": "each", "step": "implicit", "fisher": "model",
    "samples": 32,
}  # fmt: skip
ER = {
    "kind": "er", "budget": 20, "budget_scope": "client", "replay_batch": 8, "replay_weight": 0.5,
}  # fmt: skip
CALIBRATE = {"kind": "calibrate", "head": "lda", "shrinkage": 0.1, "drift": "none", "ridge": 0.001}
CLOSED = {"inputs": "features", "train_first": True}
LWF = {"kind": "lwf", "lambda": 1.0, "temperature": 2.0}
FEDOMG = {
    "kind": "fedomg", "kappa": 0.5, "normalize": True, "scale": "published", "solver": "exact",
    "scope": "model", "diagnostics": False,
}  # fmt: skip
STAMP = {
    **FEDOMG, "kind": "stamp", "spatial": True, "temporal": True, "eta": 2.0, "client_kappa": None,
    "budget": 3, "selection": "herding", "mixstyle": True, "gradients": "prototype",
    "protonet": "add", "protonet_weight": 0.1,
}  # fmt: skip
PROMPTS = {"length": 2, "pool": 4, "cache": True}
DUALP = {
    **PROMPTS,
    "general_layers": [0, 1],
    "expert_layers": [2, 3],
    "prefix": "after",
    "lambda": 1.0,
}
PIP = {
    **DUALP, "kind": "pip", "prompt": "dualp", "top": 2, "prototypes": True, "augment": 2,
    "sign": "plus", "weighted": True, "average_head": "every_round", "keys": "learned",
}  # fmt: skip

ON_BOTH: dict[str, Values] = {
    "fedavg": {"kind": "fedavg"},
    "fedprox": {"kind": "fedprox", "mu": 0.1},
    "special": SPECIAL,
    "special-c": {"kind": "special-c", "lambda": 0.1},
    "ewc": EWC,
    "er": ER,
    "lwf": LWF,
    "flwf-2t": {"kind": "flwf-2t", "alpha": 0.5, "beta": 0.25, "temperature": 2.0},
    "fot": FOT,
    "fedprotip": FEDPROTIP,
    "gpm": {
        "kind": "gpm", "threshold": 0.9, "threshold_increment": 0.01, "max_columns": 64,
        "max_examples": 64,
    },
    "stamp": STAMP,
    "fedomg": FEDOMG,
}  # fmt: skip
ON_MLP: dict[str, Values] = {
    "fedprotip+special": {**FEDPROTIP, "with": [SPECIAL]},
    "fot+special": {**FOT, "with": [SPECIAL]},
    "stamp+special": {**STAMP, "with": [SPECIAL]},
    "er+special": {**ER, "with": [SPECIAL]},
    "ewc+lwf": {**EWC, "with": [LWF]},
    "fedprox+fot": {"kind": "fedprox", "mu": 0.1, "with": [FOT]},
    "special-options": {
        **SPECIAL, "auto_lambda": True, "missing": "carry", "statistics": "blend",
    },
    "ewc-latest": {**EWC, "lambda": 10.0, "anchor": "latest"},
    "ewc-gradient": {**EWC, "lambda": 1.0, "step": "gradient", "fisher": "empirical"},
    "fot-energy": {**FOT, "rank_rule": "energy", "layers": "first_half",
                   "unprotected": "finetune"},
    "fot-open": {**FOT, "closing": False},
    "fot-noise": {**FOT, "sketch_noise": "standard", "epsilon": 5.0, "delta": 1e-5, "clip": 1.0},
    "fedprotip-sketch": {**FEDPROTIP, "transport": "sketch", "rank_rule": "mass",
                         "references": "strict", "drop_first": True},
    "fedprotip-server": {**FEDPROTIP, "projection": "server", "routing": "batch",
                         "routing_batch": 8, "diagnostics": True},
    "fedprotip-off": {**FEDPROTIP, "routing": "off"},
    "fedprotip-sequential": {**FEDPROTIP, "bases": "sequential", "threshold": 0.8,
                             "pool_references": True, "space_rank": "threshold"},
    "fedomg-tensor": {**FEDOMG, "scope": "layer", "solver": "published", "diagnostics": True},
    "stamp-client": {**STAMP, "spatial": False, "selection": "random", "gradients": "sample",
                     "mixstyle": False, "protonet": "encoder", "diagnostics": True},
    "stamp-paper": {**STAMP, "scale": "paper", "eta": None, "gradients": "sample"},
}  # fmt: skip
ON_SPLIT: dict[str, Values] = {
    "er-seen": {**ER, "budget_scope": "total", "replay_batch": None},
    "calibrate": CALIBRATE,
    "fot+calibrate": {**FOT, "with": [{**CALIBRATE, "head": "quadratic"}]},
    "calibrate-linear": {**CALIBRATE, "drift": "linear"},
    "calibrate-ncm": {**CALIBRATE, "head": "ncm"},
    "er+calibrate": {**ER, "with": [{**CALIBRATE, "drift": "memory"}]},
    "fedncm": {"kind": "fedncm", **CLOSED},
    "fedlda": {"kind": "fedlda", **CLOSED, "shrinkage": 0.1},
    "fedridge": {"kind": "fedridge", **CLOSED, "strength": 1.0, "inputs": "raw"},
    "fedprotip-pooled": {**FEDPROTIP, "bases": "pooled", "threshold": 0.8, "router": "gaussian",
                         "router_layers": 2, "unknown": 0.01},
    "fedprotip-pooled-sums": {**FEDPROTIP, "bases": "pooled", "threshold": 0.8,
                              "transport": "sketch", "router": "gaussian", "router_layers": 1,
                              "unknown": 0.0, "routing": "batch", "routing_batch": 8},
}  # fmt: skip
ON_SERVER: dict[str, tuple[float, Values]] = {
    "scaffold": (0.7, {"kind": "scaffold"}),
    "fednova": (1.0, {"kind": "fednova"}),
    "fedavgm": (0.5, {"kind": "fedavgm", "momentum": 0.9, "keep_moments": False}),
    "fedadam": (0.03, {"kind": "fedadam", "beta1": 0.9, "beta2": 0.99, "tau": 0.001,
                       "keep_moments": True}),
    "fedyogi": (0.03, {"kind": "fedyogi", "beta1": 0.9, "beta2": 0.99, "tau": 0.001,
                       "keep_moments": False}),
}  # fmt: skip
"""With the server's step size."""
ON_VIT: dict[str, Values] = {
    "fed-l2p": {**PROMPTS, "kind": "fed-l2p", "top": 2, "lambda": 0.1},
    "fed-dualp": {**DUALP, "kind": "fed-dualp", "keys": "learned"},
    "fed-dualp-mean-keys": {**DUALP, "kind": "fed-dualp", "keys": "mean"},
    "pip": PIP,
    "pip-l2p": {**PIP, "prompt": "l2p", "sign": "both", "lambda": 0.1},
    "pip-own-heads": {**PIP, "average_head": "task_end", "weighted": False},
    "pip-private-heads": {**PIP, "average_head": "never", "keys": "mean"},
    "pip-special": {**PIP, "with": [{**SPECIAL, "lambda": 0.5}]},
}


def adam(values: Values) -> Values:
    """The same with an adaptive optimizer and weight decay."""
    changed = {**values["train"], "optimizer": "adam", "lr": 0.005, "weight_decay": 0.001}
    return {**values, "train": changed}


STEPS: dict[str, Values] = {
    "fot": {"server_lr": 1.0},
    "special": {"server_lr": 1.0, "server_schedule": "1/k"},
    "fedomg": {"server_lr": 1.0},
    "stamp": {"server_lr": 1.0},
    "special-options mlp": {"server_lr": 0.5},
    "fot-energy mlp": {"server_lr": 0.5},
}
"""The server's step by kind of a method and by name of a case."""


def kinds_of(values: Values) -> list[str]:
    """The kinds of a config's methods."""
    return [part["kind"] for part in (values["method"], *values["method"].get("with", ()))]


def with_server_step(values: Values, name: str) -> Values:
    """The same with the server's step that belongs to its methods."""
    kinds = kinds_of(values)
    train = {k: v for key in (*kinds, name) for k, v in STEPS.get(key, {}).items()}
    return {**values, "train": {**values["train"], **train}}


def as_in_paper(values: Values, name: str) -> Values:
    """The same with SPECIAL's plain mean of clients."""
    if "special" not in name:
        return values
    return {**values, "train": {**values["train"], "weighting": "uniform"}}


def cases() -> Iterator[tuple[str, Values]]:
    """Every case by name, as a config."""
    named = {"single"}  # trained as fedavg is, in every task again
    for name, values in _cases():
        named.update(kinds_of(values))
        yield name, with_server_step(values, name)
    for kind in KINDS:
        if kind not in named:
            yield f"{kind} mlp", {**MLP, "method": {"kind": kind}}


def _cases() -> Iterator[tuple[str, Values]]:
    for name, method in ON_BOTH.items():
        yield f"{name} mlp", as_in_paper({**MLP, "method": method}, name)
        yield f"{name} conv", as_in_paper({**CONV, "method": method}, name)
    for name, method in ON_MLP.items():
        yield f"{name} mlp", as_in_paper({**MLP, "method": method}, name)
    for name, (step, method) in ON_SERVER.items():
        train = {**TRAIN, "server_lr": step, "server_schedule": "constant"}
        yield f"{name} mlp", {**MLP, "train": train, "method": method}
    for name in ("fedavg", "fedprox", "fedprotip", "gpm", "ewc"):
        step = {"step": "gradient", "lambda": 10.0} if name == "ewc" else {}
        yield f"{name} adam", {**adam(MLP), "method": ON_BOTH[name] | step}
    model = {**MLP["model"], "head": "growing"}
    split = {**MLP, "stream": CONV["stream"], "model": model, "train": {**TRAIN, "outputs": "task"}}
    for name in ("er", "lwf", "stamp", "ewc"):
        yield f"{name} split", {**split, "method": ON_BOTH[name]}
    for name, method in ON_SPLIT.items():
        outputs = "seen" if name == "er-seen" else "task"
        train = {**TRAIN, "outputs": outputs}
        yield f"{name} split", {**split, "train": train, "method": method}
    for name, method in ON_VIT.items():
        yield f"{name} vit", {**VIT, "method": method}


def short(values: Values) -> Values:
    """A case of two tasks of one round of two steps: so little that rounding stays small.

    Of one step with batch norm, where a client of two rows divides by almost nothing.
    """
    steps = 1 if values["model"]["kind"] == "conv" else 2
    stream = {**values["stream"], "tasks": 2}
    train = {**values["train"], "rounds": 1, "max_steps": steps}
    return {**values, "stream": stream, "train": train}


def outcome(values: Values) -> Values:
    """What a run of a case comes to."""
    result = perdure.run(values).values
    sent = {key: result["bytes"][key] for key in ("up", "down", "by_field")}
    matrix = result["matrix"]
    return {"model_sha256": result["model_sha256"], "matrix": matrix, "bytes": sent}


def final_weights(values: Values) -> dict[str, torch.Tensor]:
    """The model at the end of the short form of a case."""
    experiment = build_experiment(perdure.Config.model_validate(short(values)))
    state = run_stream(experiment, experiment.initial_state(), lambda state, event: None)
    return {name: value.contiguous() for name, value in state.server.params.items()}


def fingerprint() -> dict[str, str]:
    """What decides the last bits: torch, the processor's instructions, the system; and a probe."""
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "probe": _probe(),
    }


def _probe() -> str:
    """A hash of the bits of a few operations, since libraries choose by more than is said."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(48, 40, generator=draw)
    image = torch.randn(3, 2, 8, 8, generator=draw)
    kernel = torch.randn(4, 2, 3, 3, generator=draw)
    values = [a @ a.T, torch.linalg.svd(a.double())[1], a.softmax(1).log(), a.tanh().sum(0)]
    values.append(torch.nn.functional.conv2d(image, kernel))
    data = b"".join(value.contiguous().numpy().tobytes() for value in values)
    return hashlib.sha256(data).hexdigest()[:16]
