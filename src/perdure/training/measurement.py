"""Accuracy and metrics of the models of a run on some tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perdure.contract.evaluation import Evaluation, Evaluator
from perdure.contract.scores import MetricValues, needed_counts
from perdure.data.streams import Task
from perdure.training.experiment import Experiment
from perdure.training.state import RunState


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
