"""A section of docs/defaults.md, and the sweeps over numeric defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from perdure.config import override_key
from perdure.methods import build, hyperparameters

Values = dict[str, Any]
VALIDATION_SEEDS = (100, 101, 102)
"""Seeds on which choices are made. They are never reported."""
REPORTED_SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Variant:
    """One row of a table."""

    label: str
    """Unique in the section: `stream / name`, or `stream / method key = value` in a sweep."""
    config: Values
    """The config without its seed."""


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    text: str
    """What is measured and how to read it."""
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    rows: Literal["validation", "test"] = "test"
    columns: tuple[tuple[str, str], ...] = (("task_agnostic", "ACC"),)
    """Inference mode and metric of each column."""
    reference: str | None = None
    """Name of the row from which the others' paired differences are taken, within each stream."""
    packages: tuple[str, ...] = ()
    """Packages that must be installed."""


MLP = {"kind": "mlp", "hidden": [100, 100]}
UNEQUAL = {"kind": "dirichlet", "alpha": 0.5}
PERMUTED: Values = {
    "data": {"source": "digits"},
    "stream": {"kind": "permuted", "tasks": 5},
    "clients": {"count": 10, "partition": UNEQUAL},
    "model": MLP,
    "train": {"rounds": 10, "local_epochs": 1, "batch_size": 16, "lr": 0.1},
    "engine": {"kind": "vector", "chunk": 10},
}
"""The permuted digits of the demo."""
SPLIT: Values = {**PERMUTED, "stream": {"kind": "split", "tasks": 5}}
SHORT_TRAIN = {**PERMUTED["train"], "rounds": 5}
SHORT_PERMUTED: Values = {
    **PERMUTED, "train": SHORT_TRAIN, "stream": {"kind": "permuted", "tasks": 4},
}  # fmt: skip
SHORT_SPLIT: Values = {
    **PERMUTED, "train": SHORT_TRAIN,
    "stream": {"kind": "split", "tasks": 4, "classes_per_task": 2},
}  # fmt: skip
PROMPTS: Values = {
    **SPLIT,
    "model": {"kind": "vit"},
    "train": {
        "rounds": 5, "local_epochs": 2, "batch_size": 16, "lr": 0.02, "optimizer": "adam",
        "clip": 1.0,
    },
    "engine": {"kind": "serial"},
}  # fmt: skip
"""The split digits of the demo, on the bundled transformer."""
SHORT_PROMPTS: Values = {**PROMPTS, "train": {**PROMPTS["train"], "rounds": 3, "local_epochs": 1}}
FEW_PROMPTS: Values = {**SHORT_PROMPTS, "data": {"source": "digits", "limit": 700}}
HALF_OF_CLASSES: Values = {
    **FEW_PROMPTS,
    "clients": {"count": 10, "per_round": 5, "partition": {"kind": "classes", "fraction": 0.5}},
}


# ---- numeric defaults, swept on validation rows


@dataclass(frozen=True)
class Sweep:
    """A numeric default and four other values."""

    method: Values
    """The method and the options that the swept one needs."""
    key: str
    """Key in the config, or `calibrate.KEY` of calibrate combined with the method."""
    values: tuple[Any, ...]
    """Five values, the default among them."""
    streams: dict[str, Values] = field(
        default_factory=lambda: {"permuted digits": SHORT_PERMUTED, "split digits": SHORT_SPLIT}
    )
    default: Any = None
    """The default, if it depends on another key. If None, it is read from the code."""


BOTH_PROMPTS = {"split digits": FEW_PROMPTS, "split digits, one class per client": HALF_OF_CLASSES}
SWEEPS = (
    Sweep({"kind": "fot"}, "method.threshold", (0.7, 0.8, 0.85, 0.9, 0.95)),
    Sweep({"kind": "fot"}, "method.sketch_ratio", (0.5, 1.0, 2.0, 5.0, 10.0)),
    Sweep({"kind": "fedprotip"}, "method.threshold", (0.6, 0.7, 0.8, 0.9, 0.95)),
    Sweep({"kind": "fedprotip"}, "method.max_columns", (64, 128, 256, 512, 1024)),
    Sweep({"kind": "fedprotip"}, "method.space_rank", (5, 10, 20, 40, 80)),
    Sweep({"kind": "stamp"}, "method.kappa", (0.1, 0.25, 0.5, 0.75, 0.9)),
    Sweep({"kind": "stamp"}, "method.budget", (5, 10, 20, 40, 80)),
    Sweep({"kind": "stamp"}, "method.protonet_weight", (0.01, 0.03, 0.1, 0.3, 1.0)),
    Sweep({"kind": "special"}, "method.lambda", (0.02, 0.05, 0.1, 0.25, 0.5)),
    Sweep({"kind": "special-c"}, "method.lambda", (0.01, 0.03, 0.1, 0.3, 1.0)),
    Sweep({"kind": "pip"}, "method.lambda", (0.1, 0.3, 1.0, 3.0, 10.0), BOTH_PROMPTS, 1.0),
    Sweep({"kind": "pip"}, "method.augment", (1, 2, 5, 10, 20), BOTH_PROMPTS),
    Sweep({"kind": "pip"}, "method.length", (1, 3, 5, 8, 12), BOTH_PROMPTS),
    Sweep({"kind": "ewc"}, "method.lambda", (0.3, 1.0, 3.0, 10.0, 100.0)),
    Sweep({"kind": "er"}, "method.budget", (20, 50, 100, 200, 400)),
    Sweep({"kind": "lwf"}, "method.lambda", (0.1, 0.3, 1.0, 3.0, 10.0)),
    Sweep({"kind": "gpm"}, "method.threshold", (0.7, 0.8, 0.9, 0.95, 0.97)),
    Sweep({"kind": "fedprox"}, "method.mu", (0.001, 0.003, 0.01, 0.1, 1.0)),
    Sweep({"kind": "fedadam"}, "train.server_lr", (0.003, 0.01, 0.03, 0.1, 0.3)),
    Sweep({"kind": "fot"}, "calibrate.shrinkage", (0.001, 0.01, 0.03, 0.1, 0.3)),
)


def sweep_variants() -> Iterator[Variant]:
    """Yield one variant per sweep, stream and value."""
    for sweep in SWEEPS:
        for stream, base in sweep.streams.items():
            for value in sweep.values:
                label = f"{stream} / {sweep.method['kind']} {sweep.key} = {value}"
                yield Variant(label, swept(base, sweep, value))


def swept(base: Values, sweep: Sweep, value: Any) -> Values:
    """Return the config of a sweep with one value."""
    data, method = {**base["data"], "validation": 0.2}, sweep.method
    section, name = sweep.key.split(".")
    if section == "calibrate":
        method = {**method, "with": [{"kind": "calibrate", name: value}]}
        return {**base, "data": data, "method": method}
    return override_key({**base, "data": data, "method": method}, sweep.key, value)


def default_of(sweep: Sweep) -> Any:
    """Return the default of a swept key, as the code has it."""
    if sweep.default is not None:
        return sweep.default
    section, name = sweep.key.split(".")
    if section == "train":
        return getattr(build(sweep.method).needs, name)
    return hyperparameters("calibrate" if section == "calibrate" else sweep.method["kind"])[name]


DEFAULTS = Section(
    "Numeric defaults",
    "ACC on validation rows (a fifth of every client's training rows, never trained on).",
    VALIDATION_SEEDS,
    tuple(sweep_variants()),
    rows="validation",
)
