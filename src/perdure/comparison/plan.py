"""The runs of a comparison: every method, every value of every sweep, every seed."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.comparison.variants import MethodChoice, Sweep, unknown_sweep_key
from perdure.config import ALIASES, Config, override_key, parse
from perdure.core.errors import UserError
from perdure.methods import hyperparameters
from perdure.runs.directory import RunDirectory
from perdure.runs.search import is_run
from perdure.training.experiment import build_experiment, with_method_defaults

_METHOD = "method."


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison."""

    label: str
    """The method and what was changed for it; alike for all seeds."""
    config: Config

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.config.seed

    @property
    def name(self) -> str:
        """The run's folder below the comparison's."""
        return f"{self.label}/seed-{self.seed}"

    def path(self, out: Path) -> Path:
        """The run directory."""
        return out / self.label / f"seed-{self.seed}"

    def is_finished(self, out: Path) -> bool:
        """Whether there is a result already."""
        return (self.path(out) / "result.json").is_file()


def plan(
    values: dict[str, Any],
    methods: Sequence[MethodChoice],
    seeds: Sequence[int],
    sweeps: Sequence[Sweep] = (),
    method_dir: Path | None = None,
) -> tuple[PlannedRun, ...]:
    """All runs, seed by seed, so that every method is seen early.

    `values` are those of the config file. Keys of its own method hold for that kind alone; all
    other settings hold for every method. `method_dir`: the folder with custom methods.
    """
    known = {each.kind: _keys(each.kind, method_dir) for each in methods if sweeps}
    variants = [
        variant for choice in methods for variant in _variants(values, choice, sweeps, known)
    ]
    _check_labels([label for label, _ in variants])
    return tuple(
        PlannedRun(label, parse(settings | {"seed": seed}))
        for seed in seeds
        for label, settings in variants
    )


def check_plan(planned: Sequence[PlannedRun], out: Path, method_dir: Path | None = None) -> None:
    """Refuse what could not run or would not continue what is in `out`; nothing is written."""
    for run in planned:
        if is_run(run.path(out)):
            RunDirectory.open(run.path(out)).check_same_config(
                with_method_defaults(run.config, method_dir)
            )
    tried: set[str] = set()
    for run in planned:
        if run.label not in tried and not run.is_finished(out):
            build_experiment(run.config, method_dir=method_dir)
        tried.add(run.label)


def _variants(
    values: dict[str, Any],
    choice: MethodChoice,
    sweeps: Sequence[Sweep],
    known: dict[str, set[str]],
) -> list[tuple[str, dict[str, Any]]]:
    """A method with every combination of the sweeps that concern it."""
    settings = values | {"method": _base(values, choice.kind) | choice.keys}
    concerned = [sweep for sweep in sweeps if _concerns(sweep, choice.kind, known)]
    found = []
    for combination in itertools.product(*(sweep.values for sweep in concerned)):
        pairs = list(zip((sweep.key for sweep in concerned), combination, strict=True))
        changed = settings
        for key, value in pairs:
            changed = override_key(changed, key, value)
        found.append((_label(choice, pairs), changed))
    return found


def _base(values: dict[str, Any], kind: str) -> dict[str, Any]:
    own = values.get("method")
    return own if isinstance(own, dict) and own.get("kind") == kind else {"kind": kind}


def _keys(kind: str, method_dir: Path | None) -> set[str]:
    """The keys that a method may have in a config."""
    return {*hyperparameters(kind, method_dir), *ALIASES.get(kind, {})}


def _concerns(sweep: Sweep, kind: str, known: dict[str, set[str]]) -> bool:
    """A sweep over a hyper-parameter is for the methods that have it, any other is for all."""
    if not sweep.key.startswith(_METHOD):
        return True
    name = sweep.key.removeprefix(_METHOD).partition(".")[0]
    if not any(name in keys for keys in known.values()):
        raise unknown_sweep_key(sweep.key, list(known))
    return name in known[kind]


def _label(choice: MethodChoice, swept: Sequence[tuple[str, Any]]) -> str:
    own = choice.keys.items() if choice.name is None else ()
    pairs = [*own, *((key.removeprefix(_METHOD), value) for key, value in swept)]
    parts = [choice.name or choice.kind, *(f"{key}={value}" for key, value in pairs)]
    return re.sub(r"[^\w.=-]+", "-", "-".join(parts)).strip("-")


def _check_labels(labels: list[str]) -> None:
    twice = [label for label, count in Counter(labels).items() if count > 1]
    if twice:
        raise UserError(f"--methods: must name each method once, got {twice[0]} twice")
