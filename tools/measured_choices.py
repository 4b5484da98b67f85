"""Options that were chosen on validation rows: what was tried for each of them."""

from __future__ import annotations

import itertools
from typing import Any

from measured_sections import PERMUTED, PROMPTS, SPLIT, VALIDATION_SEEDS, Section, Values, Variant

MNIST = {"source": "npz", "path": "$mnist.npz", "limit": 2500, "test_limit": 1000}
SPLIT_MNIST: Values = {**SPLIT, "data": MNIST}
LETTERS: Values = {
    "data": {
        "source": "npz", "path": "$emnist_letters.npz", "limit": 5200, "test_limit": 2600,
    },
    "stream": {"kind": "pool", "tasks": 13, "classes_per_task": 2},
    "clients": {"count": 5, "partition": {"kind": "iid"}},
    "model": SPLIT["model"],
    "train": {"rounds": 8, "local_epochs": 2, "batch_size": 16, "lr": 0.1},
    "engine": {"kind": "vector", "chunk": 5},
}  # fmt: skip
"""The letters of STAMP's recipe, a fifth of their examples."""
STREAMS = {"permuted digits": PERMUTED, "split digits": SPLIT, "split MNIST": SPLIT_MNIST}


STAMP_STREAMS = {
    "permuted digits": PERMUTED,
    "letters, a pool": LETTERS,
}
STAMP_PARTS: tuple[Values, ...] = (
    {"gradients": "prototype"},
    {"selection": "herding", "protonet_weight": 0.1},
    {"selection": "herding", "protonet_weight": 0.03},
    {"selection": "herding", "protonet_weight": 0.01},
    {"selection": "matching", "protonet_weight": 0.03},
    {"selection": "random", "protonet_weight": 0.03},
    {"selection": "random", "protonet": "none"},
)


def held_out(base: Values) -> Values:
    """Return a config with validation rows."""
    return {**base, "data": {**base["data"], "validation": 0.2}}


def grid(streams: dict[str, Values], method: Values, **options: tuple[Any, ...]) -> list[Variant]:
    """Return one variant per stream and combination of the options' values."""
    variants = []
    for stream, base in streams.items():
        for combination in itertools.product(*options.values()):
            chosen = dict(zip(options, combination, strict=True))
            name = " ".join([method["kind"], *(f"{k}={v}" for k, v in chosen.items())])
            config = {**held_out(base), "method": {**method, **chosen}}
            variants.append(Variant(f"{stream} / {name}", config))
    return variants


def heads(kinds: tuple[str, ...]) -> list[Variant]:
    """Return methods on split streams with both heads."""
    return [
        Variant(
            f"{stream} / {kind}, {head} head",
            {**held_out(base), "model": {**base["model"], "head": head}, "method": {"kind": kind}},
        )
        for stream, base in {"split digits": SPLIT}.items()
        for kind in kinds
        for head in ("shared", "growing")
    ]


def special(streams: dict[str, Values]) -> list[Variant]:
    """Return SPECIAL with several pulls, with and without a schedule of the server's step."""
    return [
        Variant(
            f"{stream} / special lambda={pull}, {schedule}",
            {
                **held_out(base),
                "train": {**base["train"], "server_schedule": schedule},
                "method": {"kind": "special", "lambda": pull},
            },
        )
        for stream, base in streams.items()
        for pull in (0.03, 0.1, 0.3, 1.0)
        for schedule in ("constant", "1/k")
    ]


COLUMNS = (("task_agnostic", "ACC"), ("task_aware", "ACC"), ("routed", "ACC"))
OPTIONS = Section(
    "Options",
    "Options that are no numbers, and numbers that depend on each other. ACC on validation rows.",
    VALIDATION_SEEDS,
    (
        *grid(STREAMS, {"kind": "fot"}, threshold=(0.8, 0.85, 0.9, 0.95), sketch_ratio=(1.0, 5.0)),
        *grid(
            STREAMS, {"kind": "fedprotip", "router": "gaussian"},
            bases=("union", "pooled", "sequential"), threshold=(0.6, 0.8, 0.9, 0.95),
        ),
        *grid(
            STREAMS, {"kind": "ewc"},
            **{"anchor": ("latest", "each"), "lambda": (1.0, 3.0, 10.0, 30.0)},
        ),
        *grid(
            {"permuted digits": PERMUTED}, {"kind": "er"}, replay_weight=(0.33, 0.5, 0.67, 0.8)
        ),
        *itertools.chain.from_iterable(
            grid(STAMP_STREAMS, {"kind": "stamp", **parts}, **{key: (parts[key],) for key in parts},
                 scale=("paper", "published"))
            for parts in STAMP_PARTS
        ),
        *special(STREAMS),
        *grid(
            {"split digits, bundled transformer": PROMPTS}, {"kind": "pip"},
            keys=("learned", "mean"), average_head=("every_round", "task_end"),
        ),
    ),
    rows="validation",
    columns=COLUMNS,
)  # fmt: skip

HEADS = Section(
    "Heads on split streams",
    "One output per class (shared), or one block of outputs per task (growing). ACC on validation "
    "rows; task-aware shows what is lost between tasks.",
    VALIDATION_SEEDS,
    tuple(
        heads(
            (
                "fedavg", "fot", "fedprotip", "gpm", "stamp", "special", "ewc", "er", "lwf",
            )
        )
    ),
    rows="validation",
    columns=(*COLUMNS, ("task_agnostic", "learned")),
)  # fmt: skip
