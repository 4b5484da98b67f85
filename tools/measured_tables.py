"""Figures on test rows of seeds on which nothing was chosen."""

from __future__ import annotations

from typing import Any

from measured_choices import LETTERS
from measured_sections import (
    PERMUTED,
    PROMPTS,
    REPORTED_SEEDS,
    SHORT_PROMPTS,
    SPLIT,
    UNEQUAL,
    Section,
    Values,
    Variant,
)

SAME_HEAD: Values = {
    **PROMPTS,
    "model": {"kind": "vit", "head": "shared"},
    "train": {**PROMPTS["train"], "lr": 0.001},
}
"""For FedAvg of the whole transformer: the head of PIP, and a learning rate that fits."""


def table(streams: dict[str, Values], methods: dict[str, Values]) -> list[Variant]:
    """Return one variant per stream and method."""
    return [
        Variant(f"{stream} / {name}", {**base, "method": method})
        for stream, base in streams.items()
        for name, method in methods.items()
    ]


def by_kind(*kinds: str) -> dict[str, Values]:
    """Return methods at their defaults, by kind."""
    return {kind: {"kind": kind} for kind in kinds}


TRANSFORMER = "split digits, bundled transformer"
FIVE = Section(
    "The five methods beside FedAvg",
    "ACC on test rows of the demo's streams, defaults throughout, with the same head and a "
    "constant step of the server for all; differences from FedAvg are paired by seed.",
    REPORTED_SEEDS,
    (
        *table(
            {"permuted digits": PERMUTED}, by_kind("fedavg", "fot", "fedprotip", "stamp", "special")
        ),
        *table({TRANSFORMER: SAME_HEAD}, by_kind("fedavg")),
        *table({TRANSFORMER: PROMPTS}, by_kind("fed-dualp", "pip")),
    ),
    columns=(("task_agnostic", "ACC"), ("task_agnostic", "learned"), ("task_agnostic", "FGT")),
    reference="fedavg",
)


def with_schedule(schedule: str) -> list[Variant]:
    """Return methods on permuted digits with a schedule of the server's step."""
    train = {**PERMUTED["train"], "server_schedule": schedule}
    kinds = ("fedavg", "special", "special-c", "flwf-2t")
    methods: dict[str, Any] = {f"{kind}, {schedule}": {"kind": kind} for kind in kinds}
    return table({"permuted digits": {**PERMUTED, "train": train}}, methods)


SCHEDULES = Section(
    "The schedule of the server's step",
    "The published step of SPECIAL's server is 1/k in task k; a constant step shows the effect of "
    "its anchor alone. Test rows.",
    REPORTED_SEEDS,
    (*with_schedule("constant"), *with_schedule("1/k")),
    columns=(("task_agnostic", "ACC"), ("task_agnostic", "learned"), ("task_agnostic", "BWT")),
    reference="fedavg, constant",
)


# ---- STAMP and its parts

NO_PROTONET = {"protonet": "none"}
NO_CORESET = {"selection": "random", **NO_PROTONET}
PARTS: dict[str, Values] = {
    "fedavg": {"kind": "fedavg"},
    "(1) server": {"kind": "stamp", "temporal": False, **NO_PROTONET},
    "(2) client": {"kind": "stamp", "spatial": False, **NO_CORESET},
    "(1)+(2)": {"kind": "stamp", **NO_CORESET},
    "(1)+(3)": {"kind": "stamp", "temporal": False},
    "(2)+(3)": {"kind": "stamp", "spatial": False},
    "all, eq. 3 to the letter": {"kind": "stamp", "gradients": "prototype"},
    "all": {"kind": "stamp"},
}
STAMP = Section(
    "STAMP and its parts",
    "(1) aligns clients on the server, (2) aligns tasks on clients, (3) is the coreset by features "
    "with the prototypical loss (Table 2 of the paper). Experience replay stores as many examples.",
    REPORTED_SEEDS,
    (
        *table({"permuted digits": PERMUTED}, PARTS | {"er": {"kind": "er", "budget": 200}}),
        *table({"letters, a pool": LETTERS}, PARTS | {"er": {"kind": "er", "budget": 520}}),
    ),
    columns=(("task_agnostic", "ACC"), ("task_agnostic", "learned"), ("task_agnostic", "AF")),
    reference="all",
)


# ---- FedProTIP's routers

POOLED = {"kind": "fedprotip", "bases": "pooled", "threshold": 0.9}
GAUSSIAN = {**POOLED, "router": "gaussian"}
REFERENCES = {**POOLED, "router": "references", "pool_references": True}
LETTER = {
    "kind": "fedprotip", "bases": "union", "threshold": 0.6, "router": "references",
    "pool_references": False,
}  # fmt: skip
ROUTERS: dict[str, Values] = {
    "Gaussian router, per batch": {**GAUSSIAN, "routing": "batch"},
    "Gaussian router, per sample": {**GAUSSIAN, "routing": "sample"},
    "the paper's router, pooled, per batch": {**REFERENCES, "routing": "batch"},
    "the paper's router, pooled, per sample": {**REFERENCES, "routing": "sample"},
    "the paper's letter, per batch": {**LETTER, "routing": "batch"},
    "the paper's letter, per sample": {**LETTER, "routing": "sample"},
}
BY_GAUSSIANS = {"Gaussian router, per batch": ROUTERS["Gaussian router, per batch"]}
RECIPE_TRAIN = {"rounds": 20, "local_epochs": 2, "batch_size": 16, "lr": 0.1}
MNIST_5000 = {"source": "npz", "path": "$mnist.npz", "limit": 5000, "test_limit": 2000}
FIVE_CLIENTS = {"count": 5, "partition": UNEQUAL}
ROUTER_COLUMNS = (("routed", "ACC"), ("task_aware", "ACC"), ("task_agnostic", "ACC"))
ROUTER = Section(
    "FedProTIP's routers",
    "Accuracy with the predicted task (routed) beside that with the given task (task-aware), which "
    "bounds it. The Gaussian router is not in the paper.",
    tuple(range(10)),
    (
        *table({"split digits": {**SPLIT, "train": RECIPE_TRAIN}}, ROUTERS),
        *table(
            {
                "split MNIST": {
                    **SPLIT, "data": MNIST_5000, "clients": FIVE_CLIENTS,
                    "train": {"rounds": 5, "local_epochs": 2, "batch_size": 32, "lr": 0.05},
                    "engine": {"kind": "vector", "chunk": 5},
                }
            },
            ROUTERS,
        ),
    ),
    columns=ROUTER_COLUMNS,
)  # fmt: skip
FROZEN_VIT = {"frozen": ["patch", "cls", "positions", "block0.", "block1.", "block2."]}
ROUTER_VIT = Section(
    "FedProTIP's routers on the bundled transformer",
    "Split MNIST; embeddings and half of the blocks are frozen after the first task.",
    tuple(range(10)),
    tuple(
        table(
            {
                "split MNIST, bundled transformer": {
                    **SPLIT, "data": {**MNIST_5000, "limit": 1000, "test_limit": 1000},
                    "clients": FIVE_CLIENTS, "model": {"kind": "vit", "head": "growing"},
                    "train": {"rounds": 3, "local_epochs": 2, "batch_size": 32, "lr": 0.01},
                    "engine": {"kind": "serial"},
                }
            },
            {name: method | FROZEN_VIT for name, method in BY_GAUSSIANS.items()},
        )
    ),
    columns=ROUTER_COLUMNS,
)  # fmt: skip
IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
CIFAR: Values = {
    "data": {
        "source": "npz", "path": "$cifar100.npz", "limit": 8000, "test_limit": 2500, **IMAGENET,
    },
    "stream": {"kind": "split", "tasks": 5, "classes_per_task": 10},
    "clients": FIVE_CLIENTS,
    "model": {
        "kind": "resnet20", "init": "$weights/resnet20_cifar10.safetensors", "head": "growing",
    },
    "train": {
        "rounds": 3, "local_epochs": 1, "batch_size": 32, "lr": 0.05, "weight_decay": 5.0e-4,
    },
    "engine": {"kind": "serial"},
}  # fmt: skip
ROUTER_CIFAR = Section(
    "FedProTIP's routers on CIFAR-100",
    "A ResNet-20 that was pretrained on CIFAR-10, five tasks of ten classes; the first stage is "
    "frozen after the first task.",
    REPORTED_SEEDS,
    tuple(
        table(
            {"CIFAR-100": CIFAR},
            {
                name: method | {"frozen": ["conv1", "bn1", "layer1"]}
                for name, method in BY_GAUSSIANS.items()
            },
        )
    ),
    columns=ROUTER_COLUMNS,
)  # fmt: skip


# ---- calibration

GROWING = {"model": {**SPLIT["model"], "head": "growing"}}
FEWER_ROUNDS = {**SPLIT["train"], "rounds": 6}
MNIST_1500 = {**MNIST_5000, "limit": 1500, "test_limit": 1000}
LETTERS_2600 = {**LETTERS["data"], "limit": 2600, "test_limit": 1300}
SPLIT_LETTERS: Values = {
    **SPLIT, **GROWING, "data": LETTERS_2600, "clients": FIVE_CLIENTS, "train": FEWER_ROUNDS,
    "stream": {"kind": "split", "tasks": 13, "classes_per_task": 2},
    "engine": {"kind": "vector", "chunk": 5},
}  # fmt: skip
CALIBRATED_STREAMS: dict[str, Values] = {
    "split digits": {**SPLIT, **GROWING},
    "split MNIST": {**SPLIT, **GROWING, "data": MNIST_1500, "train": FEWER_ROUNDS},
    "split letters": SPLIT_LETTERS,
}
PROMPTED_STREAMS: dict[str, Values] = {
    "split digits": SHORT_PROMPTS,
    "split MNIST": {**SHORT_PROMPTS, "data": MNIST_1500},
    "split letters": {
        **SHORT_PROMPTS, "data": LETTERS_2600, "stream": SPLIT_LETTERS["stream"],
        "clients": FIVE_CLIENTS,
    },
}  # fmt: skip
STALE = {"kind": "calibrate", "head": "ncm", "drift": "none"}
FULL_RANK = {"kind": "calibrate", "head": "quadratic"}
LESS_SHRINKAGE = {"kind": "calibrate", "shrinkage": 0.01}


def calibrated(name: str, method: Values, quadratic: bool = False) -> dict[str, Values]:
    """Return a method, with the class means of its stale features, and with calibrate."""
    rows = {
        name: method,
        f"{name}, stale class means": {**method, "with": [STALE]},
        f"{name} + calibrate": {**method, "with": [{"kind": "calibrate"}]},
    }
    if quadratic:
        rows[f"{name} + calibrate, quadratic"] = {**method, "with": [FULL_RANK]}
    return rows


CALIBRATION = Section(
    "Calibrated heads",
    "`calibrate` refits the head over all classes from Gaussians of their features. Stale class "
    "means are those of the features at the time of each class's task. Growing heads; PIP on the "
    "bundled transformer, the others on an MLP. References: the nearest class mean (fedncm) and "
    "linear discriminants (fedlda) of raw inputs, and FedAvg trained on all tasks so far (joint). "
    "Every method gains. STAMP, SPECIAL, and FOT and FedProTIP with `lda`, stay below linear "
    "discriminants of raw inputs on all three streams. With `quadratic`, FOT and FedProTIP are "
    "above the nearest class mean of raw inputs everywhere. PIP's features hardly move: their "
    "class means are strong, and only `quadratic` on digits adds five points to them.",
    REPORTED_SEEDS,
    (
        *table(
            CALIBRATED_STREAMS,
            {
                **calibrated("fot", {"kind": "fot"}, quadratic=True),
                **calibrated("fedprotip", {**POOLED, "routing": "off"}, quadratic=True),
                **calibrated("stamp", {"kind": "stamp"}),
                **calibrated("special", {"kind": "special"}),
            },
        ),
        *table(PROMPTED_STREAMS, calibrated("pip", {"kind": "pip"}, quadratic=True)),
        *table(
            {"split digits": SHORT_PROMPTS},
            {"pip + calibrate, shrinkage 0.01": {"kind": "pip", "with": [LESS_SHRINKAGE]}},
        ),
        *table(
            CALIBRATED_STREAMS,
            {
                "fedncm, raw inputs": {"kind": "fedncm", "inputs": "raw"},
                "fedlda, raw inputs": {"kind": "fedlda", "inputs": "raw"},
            },
        ),
        *(
            Variant(
                f"{stream} / joint",
                {
                    **base, "stream": {**base["stream"], "cumulative": True},
                    "method": {"kind": "fedavg"},
                },
            )
            for stream, base in CALIBRATED_STREAMS.items()
        ),
    ),
    columns=(("task_agnostic", "ACC"), ("task_aware", "ACC"), ("task_agnostic", "learned")),
)  # fmt: skip
