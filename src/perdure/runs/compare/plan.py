"""Plan the runs of a comparison: every method, value of a sweep and seed, and references."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.config import Config, override_key, parse
from perdure.core.errors import UserError, bad_value
from perdure.core.text import argument
from perdure.deploy.custom_code import check_in_files
from perdure.methods.registry import hyperparameters, is_reference
from perdure.runs.compare.variants import ALIASES, Alias, MethodChoice, Sweep, unknown_sweep_key
from perdure.runs.directory import RunDirectory, is_run
from perdure.training.experiment import build_experiment
from perdure.training.settings import with_method_defaults

_METHOD = "method."


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison."""

    label: str
    """Name of the method and its changed settings; equal for all seeds."""
    config: Config
    """Config of the run, with its seed."""
    method: str | None = None
    """Label of its method without swept values. If None, the label."""

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.config.seed

    @property
    def is_reference(self) -> bool:
        """Return whether the run is a reference: joint training, or a kind that is one."""
        return self.config.stream.cumulative or is_reference(self.config.method["kind"])

    @property
    def name(self) -> str:
        """Return the path of the run directory relative to that of the comparison."""
        return f"{self.label}/seed-{self.seed}"

    def path(self, out: Path) -> Path:
        """Return the run directory, given the directory of the comparison."""
        return out / self.label / f"seed-{self.seed}"

    def is_finished(self, out: Path) -> bool:
        """Return whether the run directory holds a result."""
        return (self.path(out) / "result.json").is_file()


def plan(
    values: dict[str, Any],
    methods: Sequence[MethodChoice],
    seeds: Sequence[int],
    sweeps: Sequence[Sweep] = (),
    method_dir: Path | None = None,
) -> tuple[PlannedRun, ...]:
    """Return all runs of a comparison, ordered by seed, so that every method starts early.

    Raises:
        UserError: A config is invalid, no method has a swept hyperparameter, or two methods have
            the same label.

    """
    known = {choice.kind: _keys(choice.kind, method_dir) for choice in methods if sweeps}
    variants = [
        variant for choice in methods for variant in _variants(values, choice, sweeps, known)
    ]
    _check_labels([label for label, _, _ in variants])
    return tuple(
        PlannedRun(label, parse(settings | {"seed": seed}, method_dir), method)
        for seed in seeds
        for label, settings, method in variants
    )


def check_plan(planned: Sequence[PlannedRun], out: Path, method_dir: Path | None = None) -> None:
    """Check that every run can start or can resume the run in its directory; write nothing.

    Raises:
        UserError: A config is not supported, or differs from that of an existing run.

    """
    for run in planned:
        check_in_files(run.label, run.config)
        if is_run(run.path(out)):
            RunDirectory.open(run.path(out)).check_same_config(
                with_method_defaults(run.config, method_dir)
            )
    first = {run.label: run for run in reversed(planned)}
    unfinished = [run for run in reversed(first.values()) if not run.is_finished(out)]
    raise_first_error(unfinished, lambda run: build_experiment(run.config, method_dir=method_dir))


def raise_first_error(runs: Sequence[PlannedRun], check: Callable[[PlannedRun], object]) -> None:
    """Check runs, one per label; of several, an error that not all share names its method."""
    errors = {run.label: error for run in runs if (error := _error_of(check, run))}
    if not errors:
        return
    label, message = next(iter(errors.items()))
    shared = len(errors) == len(runs) and len(set(errors.values())) == 1
    raise UserError(message if shared else f"{label}: {message}")


def _error_of(check: Callable[[PlannedRun], object], run: PlannedRun) -> str | None:
    try:
        check(run)
    except UserError as error:
        return str(error)
    return None


def _variants(
    values: dict[str, Any],
    choice: MethodChoice,
    sweeps: Sequence[Sweep],
    known: dict[str, set[str]],
) -> list[tuple[str, dict[str, Any], str]]:
    """Return label, values and unswept label of a method with every combination of its sweeps."""
    meant = ALIASES.get(choice.kind, Alias(choice.kind, {}))
    settings = values | {"method": _base(values, meant.kind) | choice.keys}
    for key, value in meant.settings.items():
        settings = override_key(settings, key, value)
    applied = [sweep for sweep in sweeps if _applies(sweep, choice.kind, known)]
    variants = []
    for combination in itertools.product(*(sweep.values for sweep in applied)):
        pairs = list(zip((sweep.key for sweep in applied), combination, strict=True))
        changed = settings
        for key, value in pairs:
            changed = override_key(changed, key, value)
        variants.append((_label(choice, pairs), changed, _label(choice, ())))
    return variants


def _base(values: dict[str, Any], kind: str) -> dict[str, Any]:
    method = values.get("method")
    return method if isinstance(method, dict) and method.get("kind") == kind else {"kind": kind}


def _keys(name: str, method_dir: Path | None) -> set[str]:
    """Return the keys that a method may have in a config."""
    kind = ALIASES[name].kind if name in ALIASES else name
    return set(hyperparameters(kind, method_dir))


def _applies(sweep: Sweep, kind: str, known: dict[str, set[str]]) -> bool:
    """Return whether a sweep applies to a method."""
    if not sweep.key.startswith(_METHOD):
        return True
    name = sweep.key.removeprefix(_METHOD).partition(".")[0]
    if not any(name in keys for keys in known.values()):
        raise unknown_sweep_key(sweep.key, list(known))
    return name in known[kind]


def _label(choice: MethodChoice, swept: Sequence[tuple[str, Any]]) -> str:
    keys = choice.keys.items() if choice.name is None else ()
    pairs = [*keys, *((key.removeprefix(_METHOD), value) for key, value in swept)]
    parts = [choice.name or choice.kind, *(f"{key}={value}" for key, value in pairs)]
    label = "-".join(parts).replace("=1/", "=1-over-")
    return re.sub(r"[^\w.=-]+", "-", label).strip("-")


def _check_labels(labels: list[str]) -> None:
    repeated = [label for label, count in Counter(labels).items() if count > 1]
    if repeated:
        raise UserError(
            f"{argument('methods')}: must name each method once, got {repeated[0]} twice"
        )


# ---- References: what the figures of a comparison are judged by
#
# `joint` is no method but a setting: FedAvg on a cumulative stream. The others are methods.

log = logging.getLogger(__name__)

SETS = ("closed-form", "all", "none")
"""Sets of references that a comparison adds to its methods."""
CLOSED_FORM = ("fedncm", "fedlda", "fedridge")
TRAINED = (MethodChoice("joint"), MethodChoice("single"))
_MAX_GRAM = 4096
"""Values of an example above which the Gram matrix of raw inputs is too large to add up."""


def plan_references(
    values: dict[str, Any],
    chosen: str,
    planned: Sequence[PlannedRun],
    method_dir: Path | None = None,
) -> tuple[PlannedRun, ...]:
    """Return the runs of the references that a comparison does not have yet.

    A reference that the config does not allow is left out with a warning.
    """
    if chosen not in SETS:
        raise bad_value(argument("references"), chosen, ", ".join(SETS))
    seeds = tuple(dict.fromkeys(run.seed for run in planned))
    if chosen == "none" or not seeds:
        return ()
    present = {run.label for run in planned} | {repr(_work(run.config)) for run in planned}
    added: list[PlannedRun] = []
    for choice in reference_choices(parse(values, method_dir), chosen):
        runs = plan(values, [choice], seeds, method_dir=method_dir)
        known = {runs[0].label, repr(_work(runs[0].config))} & present
        if not known and _is_possible(runs[0], method_dir):
            added += runs
    order = {seed: position for position, seed in enumerate(seeds)}
    return tuple(sorted(added, key=lambda run: order[run.seed]))


def reference_choices(config: Config, chosen: str) -> tuple[MethodChoice, ...]:
    """Return the references that suit a config.

    `closed-form`: the heads in closed form, on raw inputs and, if the model is pretrained, on its
    features. `all`: besides these `joint` and `single`, and for a model that is not pretrained the
    heads in closed form on a body that is trained in the first task and frozen then.
    """
    pretrained = config.model.is_pretrained
    raw = [MethodChoice(kind, {"inputs": "raw"}, f"{kind}-raw") for kind in CLOSED_FORM]
    features = [MethodChoice(kind) for kind in CLOSED_FORM if pretrained]
    if chosen == "closed-form":
        return (*raw, *features)
    first = [MethodChoice(k, {"train_first": True}, f"{k}-task-1") for k in CLOSED_FORM]
    return (*TRAINED, *raw, *features, *([] if pretrained else first))


def _work(config: Config) -> dict[str, Any]:
    """Return what a run does, whatever its label and seed."""
    return with_method_defaults(config).model_dump(mode="json", exclude={"seed"})


def _is_possible(run: PlannedRun, method_dir: Path | None) -> bool:
    """Return whether a reference can run, and warn if it cannot."""
    try:
        experiment = build_experiment(run.config, method_dir=method_dir)
    except UserError as error:
        log.warning("the reference %s is left out: %s", run.label, error)
        return False
    size, method = math.prod(experiment.stream.shape), run.config.method
    too_large = method.get("inputs") == "raw" and method["kind"] != "fedncm" and size > _MAX_GRAM
    if too_large:
        log.warning("the reference %s is left out: an example has %d values", run.label, size)
    return not too_large
