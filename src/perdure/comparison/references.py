"""References: what the figures of a comparison are judged by.

`joint` is no method but a setting: FedAvg on a cumulative stream. The others are methods.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perdure.comparison.plan import PlannedRun, plan
from perdure.comparison.variants import MethodChoice
from perdure.config import Config, parse
from perdure.core.errors import UserError, bad_value
from perdure.core.spelling import argument
from perdure.training.experiment import build_experiment
from perdure.training.open_settings import with_method_defaults

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

    Args:
        values: Values of the comparison's config.
        chosen: Which references.
        planned: The other runs of the comparison, with all its seeds.
        method_dir: Directory with custom methods.
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
    pretrained = _is_pretrained(config)
    raw = [MethodChoice(kind, {"inputs": "raw"}, f"{kind}-raw") for kind in CLOSED_FORM]
    features = [MethodChoice(kind) for kind in CLOSED_FORM if pretrained]
    if chosen == "closed-form":
        return (*raw, *features)
    first = [MethodChoice(k, {"train_first": True}, f"{k}-task-1") for k in CLOSED_FORM]
    return (*TRAINED, *raw, *features, *([] if pretrained else first))


def _is_pretrained(config: Config) -> bool:
    """Return whether the model's features mean something before any training."""
    model = config.model
    is_backbone = model.kind in ("vit", "text") and model.init != "random"
    return is_backbone or model.weights_file is not None


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
