"""Events: what a run reports after every round and task, measured accuracy and warnings."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from perdure.contract.context import Context
from perdure.contract.uploads import Change, FailedUpload, MaskedUpload, StackedUploads
from perdure.core.errors import RunError
from perdure.core.event_log import Event
from perdure.core.trees import Tensors
from perdure.data.partition import small_clients
from perdure.data.streams.stream import Task
from perdure.evaluation.evaluator import Evaluation, Evaluator
from perdure.evaluation.forgetting import Matrix
from perdure.evaluation.metrics import MetricValues, needed_counts
from perdure.training.experiment import Experiment
from perdure.training.privacy import privacy_spent
from perdure.training.state import RunState

# ---- Accuracy and metrics of the models of a run on some tasks


def measure(
    experiment: Experiment, state: RunState, tasks: Sequence[Task], scores: bool = False
) -> list[Evaluation]:
    """Return the accuracy on each task and, with `scores`, the metrics of `evaluate.metrics`.

    If all tasks of the stream have the same outputs, a predicted task restricts nothing: there is
    no routed accuracy then, although tasks are predicted.
    """
    evaluators = evaluators_of(experiment, state)
    if scores:
        metrics, needed = experiment.metrics, needed_counts(experiment.metrics)
        evaluators = [replace(e, metrics=metrics, metric_counts=needed) for e in evaluators]
    evaluations = experiment.engine.evaluate(evaluators, list(tasks))
    if not experiment.network.outputs.same_for_all_tasks:
        return evaluations
    return [_without_routed(evaluation) for evaluation in evaluations]


def evaluators_of(experiment: Experiment, state: RunState) -> list[Evaluator]:
    """Return the models to evaluate: the global one, or one per client if they are personal."""
    if not experiment.is_personal(state):
        network = experiment.plan(state).context.network
        return [Evaluator(experiment.method, state.server, network, state.task)]
    clients: list[int | None] = [*experiment.store.clients()] or [None]
    return [_personal(experiment, state, client) for client in clients]


def _personal(experiment: Experiment, state: RunState, client: int | None) -> Evaluator:
    """Return the model of a client; None for one that has not taken part yet."""
    method, server = experiment.method, state.server
    network = experiment.plan(state).context.network
    own, private = (method.ClientState(), {}) if client is None else experiment.client_state(client)
    personal = replace(server, params=server.params | private)
    return Evaluator(method, personal, network, state.task, own, client)


def _without_routed(evaluation: Evaluation) -> Evaluation:
    return replace(
        evaluation,
        accuracy={**evaluation.accuracy, "routed": None},
        scores=_unrouted(evaluation.scores),
        client_scores={c: _unrouted(scores) for c, scores in evaluation.client_scores.items()},
    )


def _unrouted(scores: MetricValues) -> MetricValues:
    return {name: {**by_mode, "routed": None} for name, by_mode in scores.items()}


# ---- Warnings that a run gives once: what a method says of its limits, and that a run diverges.

log = logging.getLogger(__name__)
EXPLODES = 10.0
"""Length of a round's change, as a multiple of the model's, above which a run diverges."""


def has_warned(state: RunState, key: str) -> bool:
    """Return whether the run has given a warning with this key."""
    return any(warning["key"] == key for warning in state.counters.warnings)


def warn_once(state: RunState, context: Context, key: str, text: str) -> None:
    """Log and record a warning, unless the run has given one with this key."""
    if has_warned(state, key):
        return
    at = {"task": context.task, "round": context.round}
    state.counters.warnings.append({"key": key, **at, "text": text})
    is_end = context.round >= context.rounds
    where = "end" if is_end else f"round {context.round + 1}"
    log.warning("task %d %s: %s", context.task + 1, where, text)


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


def likely_cause(experiment: Experiment, state: RunState, context: Context) -> str:
    """Return what may make training diverge, as part of a sentence."""
    hints = [experiment.method.diagnose(state.server, context).divergence]
    hints.append(f"train.lr {context.lr:g} (try {context.lr / 10:g}, or train.clip)")
    server_lr = experiment.config_at(context.task).train.server_lr
    if server_lr is not None and server_lr > 1:
        hints.append(f"train.server_lr {server_lr:g} (try 1)")
    return f"likely cause: {', or '.join(filter(None, hints))}"


def check_change(experiment: Experiment, state: RunState, change: Change, context: Context) -> None:
    """Stop a run whose model would not be finite, and warn of a change that explodes.

    Raises:
        RunError: A value is not finite.

    """
    length = _length(change.params)
    if not math.isfinite(length) or not math.isfinite(_length(change.buffers)):
        where = f"task {context.task + 1} round {context.round + 1}"
        raise RunError(
            f"{where}: the aggregated update is not finite; "
            f"{likely_cause(experiment, state, context)}; "
            "the run stops at its last checkpoint"
        )
    model = _length(state.server.params)
    if length > EXPLODES * model > 0:
        times = f"{length / model:.3g} times as long as the model"
        warn_diverging(experiment, state, context, f"the change of the model is {times}")


def warn_diverging(experiment: Experiment, state: RunState, context: Context, symptom: str) -> None:
    """Warn once that the run diverges, with its symptom and its likely cause."""
    if not has_warned(state, "diverging"):
        cause = likely_cause(experiment, state, context)
        warn_once(state, context, "diverging", f"{symptom}; {cause}")


def _length(tensors: Tensors) -> float:
    """Return the Euclidean norm of all values together; not finite if one of them is not."""
    values = [value for value in tensors.values() if value.is_floating_point()]
    return math.hypot(*(float(torch.linalg.vector_norm(value)) for value in values))


# ---- Events: what a run reports after every round and every task, as lines of events.jsonl

EventCallback = Callable[[RunState, Event], None]
"""Called as `callback(state, event)`."""


def accuracies_within_task(experiment: Experiment, state: RunState, current: int) -> Event:
    """Return accuracies within a task: on it and, if the config asks for it, on earlier ones."""
    is_all = experiment.config.runs.evaluate_all
    tasks = [experiment.task(task) for task in range(0 if is_all else current, current + 1)]
    evaluations = measure(experiment, state, tasks)
    event: Event = {"accuracy": evaluations[-1].accuracy}
    if is_all:
        modes = evaluations[-1].accuracy
        event["accuracies"] = {mode: [e.accuracy[mode] for e in evaluations] for mode in modes}
    return event


def task_event(experiment: Experiment, state: RunState) -> Event:
    """Return the event of a finished task, whose evaluation is the last row of `state.matrix`."""
    privacy = privacy_spent(experiment, state)
    return {
        "event": "task",
        "task": state.task,
        "accuracy": last_rows(state.matrix),
        **({"scores": {n: last_rows(m) for n, m in state.scores.items()}} if state.scores else {}),
        "routing": state.routing[-1],
        **(
            {"validation": last_rows(state.validation)} if experiment.config.data.validation else {}
        ),
        "bytes": dict(state.ledger.by_task[-1]),
        **diagnostics_event(experiment, state, experiment.context(state)),
        **({"privacy": privacy} if privacy else {}),
    }


def last_rows(matrices: dict[str, Matrix]) -> dict[str, list[float | None]]:
    """Return the last row of the matrix of every mode."""
    return {mode: rows[-1] for mode, rows in matrices.items()}


def clients_event(
    context: Context, uploads: StackedUploads | MaskedUpload | FailedUpload, sampled: int
) -> Event:
    """Return the event of uploads that arrived within a round in which `sampled` clients train."""
    done = len(uploads.clients) if isinstance(uploads, StackedUploads) else 1
    at = {"task": context.task, "round": context.round, "attempt": context.attempt}
    return {"event": "clients", **at, "done": done, "sampled": sampled}


def diagnostics_event(experiment: Experiment, state: RunState, context: Context) -> Event:
    """Return the method's numbers, and all warnings of this round, the method's among them."""
    diagnosis = experiment.method.diagnose(state.server, context)
    for key, text in diagnosis.warnings.items():
        warn_once(state, context, key, text)
    at, given = (context.task, context.round), state.counters.warnings
    warnings = [each["text"] for each in given if (each["task"], each["round"]) == at]
    event: Event = {"method": diagnosis.numbers} if diagnosis.numbers else {}
    return event | ({"warnings": warnings} if warnings else {})
