"""Warnings that a run gives once: what a method says of its limits, and that a run diverges."""

from __future__ import annotations

import logging
import math

import torch

from perdure.contract.context import Context
from perdure.contract.uploads import Change
from perdure.core.errors import RunError
from perdure.core.trees import Tensors
from perdure.data.partition import small_clients
from perdure.training.experiment import Experiment
from perdure.training.state import RunState

log = logging.getLogger(__name__)
EXPLODES = 10.0
"""Length of a round's change, as a multiple of the model's, above which a run diverges."""


def warn_once(state: RunState, context: Context, key: str, text: str) -> None:
    """Log and record a warning, unless the run has given one with this key."""
    if any(warning["key"] == key for warning in state.counters.warnings):
        return
    at = {"task": context.task, "round": context.round}
    state.counters.warnings.append({"key": key, **at, "text": text})
    is_end = context.round >= context.rounds
    where = "end" if is_end else f"round {context.round + 1}"
    log.warning("task %d %s: %s", context.task + 1, where, text)


def record_warnings(experiment: Experiment, state: RunState, context: Context) -> list[str]:
    """Give what the method warns of, and return all warnings of this round."""
    for key, text in experiment.method.warnings(state.server, context).items():
        warn_once(state, context, key, text)
    at = (context.task, context.round)
    return [w["text"] for w in state.counters.warnings if (w["task"], w["round"]) == at]


def warn_small_clients(experiment: Experiment, state: RunState) -> None:
    """Name the clients that have too few rows of the current task to take part in it."""
    small = small_clients(experiment.task(state.task).partition)
    if not small:
        return
    context, names = experiment.context(state), ", ".join(map(str, small))
    text = (
        f"clients with fewer than {experiment.min_rows} rows take no part in this task: {names} "
        "(privacy.min_rows asks for so many, since uploads about a few rows show them)"
    )
    warn_once(state, context, f"rows of task {state.task}", text)


def likely_cause(experiment: Experiment, context: Context) -> str:
    """Return what may make training diverge, as part of a sentence."""
    hints = [experiment.method.divergence_hint(context)]
    hints.append(f"train.lr {context.lr:g} (try {context.lr / 10:g}, or train.clip)")
    server_lr = experiment.config_at(context.task).train.server_lr
    if server_lr is not None and server_lr > 1:
        hints.append(f"train.server_lr {server_lr:g} (try 1)")
    return f"likely cause: {', or '.join(filter(None, hints))}"


def check_change(experiment: Experiment, state: RunState, change: Change, context: Context) -> None:
    """Stop a run whose model would not be finite, and warn of a change that explodes.

    Args:
        experiment: The experiment.
        state: The state before the change.
        change: What the round adds to the model.
        context: The context of the round.

    Raises:
        RunError: A value is not finite.
    """
    length = _length(change.params)
    if not math.isfinite(length) or not math.isfinite(_length(change.buffers)):
        where = f"task {context.task + 1} round {context.round + 1}"
        raise RunError(
            f"{where}: the aggregated update is not finite; {likely_cause(experiment, context)}; "
            "the run stops at its last checkpoint"
        )
    model = _length(state.server.params)
    if length > EXPLODES * model > 0:
        times = f"{length / model:.3g} times as long as the model"
        warn_diverging(experiment, state, context, f"the change of the model is {times}")


def warn_diverging(experiment: Experiment, state: RunState, context: Context, symptom: str) -> None:
    """Warn once that the run diverges, with its symptom and its likely cause."""
    cause = likely_cause(experiment, context)
    warn_once(state, context, "diverging", f"{symptom}; {cause}")


def _length(tensors: Tensors) -> float:
    """Return the Euclidean norm of all values together; not finite if one of them is not."""
    values = [value for value in tensors.values() if value.is_floating_point()]
    return math.hypot(*(float(torch.linalg.vector_norm(value)) for value in values))
