"""Events: what a run reports after every round and every task, as lines of events.jsonl."""

from __future__ import annotations

import math
from collections.abc import Callable

from perdure.contract.context import Context
from perdure.contract.upload_collector import (
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    UploadCollector,
)
from perdure.core.event_log import Event
from perdure.training.experiment import Experiment
from perdure.training.measurement import measure
from perdure.training.metrics import Matrix
from perdure.training.privacy_summary import privacy_spent
from perdure.training.state import RunState
from perdure.training.warnings import record_warnings

EventCallback = Callable[[RunState, Event], None]
"""Called as `callback(state, event)`."""


def round_event(
    experiment: Experiment,
    state: RunState,
    context: Context,
    sampled: list[int],
    collector: UploadCollector,
) -> Event:
    """Return the event of a finished round, with accuracies if `runs.evaluate_every` asks for them.

    Args:
        experiment: The experiment.
        state: The state after the round.
        context: The context of the round, at its last attempt.
        sampled: Indices of the sampled clients.
        collector: The uploads of the round.
    """
    failed = [failure.client for failure in collector.failures]
    event: Event = {
        "event": "round",
        "task": context.task,
        "round": context.round,
        "lr": context.lr,
        "sampled": len(sampled),
        "clients": len(collector.collected.clients),
        "rejected": collector.rejected,
        **({"failed": failed} if failed else {}),
        **_participants(experiment, collector),
        "bytes": dict(state.ledger.by_task[-1]),
        **_loss(experiment, collector),
        **_diagnostics(experiment, state, context),
    }
    every = experiment.config.runs.evaluate_every
    if every and state.round % every == 0:
        event |= _accuracies(experiment, state, context.task)
    return event


def _accuracies(experiment: Experiment, state: RunState, current: int) -> Event:
    """Return accuracies within a task: on it and, if the config asks for it, on earlier ones."""
    is_all = experiment.config.runs.evaluate_all
    tasks = [experiment.task(task) for task in range(0 if is_all else current, current + 1)]
    evaluations = measure(experiment, state, tasks)
    event: Event = {"accuracy": evaluations[-1].accuracy}
    if is_all:
        modes = evaluations[-1].accuracy
        event["accuracies"] = {mode: [e.accuracy[mode] for e in evaluations] for mode in modes}
    return event


def _participants(experiment: Experiment, collector: UploadCollector) -> Event:
    """Return whose uploads count in a federation, which continues without nodes that fail."""
    if experiment.privacy.simulated:
        return {}
    return {"participants": sorted(collector.collected.clients)}


def _loss(experiment: Experiment, collector: UploadCollector) -> Event:
    """Return the mean training loss of the round, weighted as clients are.

    It is left out where uploads are noisy, since it would leave the clients without noise, and
    where no client reports it (a federation with secure aggregation). In a simulation with secure
    aggregation it is a sum as well.
    """
    losses = [loss for c, loss in collector.losses.items() if c not in collector.rejected]
    total = sum(weight for weight, _ in losses)
    mean = sum(weight * loss for weight, loss in losses) / total if total else math.nan
    is_private = experiment.config.privacy.clip is not None
    return {} if is_private or not math.isfinite(mean) else {"loss": mean}


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
        **_diagnostics(experiment, state, experiment.context(state)),
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


def _diagnostics(experiment: Experiment, state: RunState, context: Context) -> Event:
    numbers = experiment.method.diagnostics(state.server, context)
    warnings = record_warnings(experiment, state, context)
    event: Event = {"method": numbers} if numbers else {}
    return event | ({"warnings": warnings} if warnings else {})
