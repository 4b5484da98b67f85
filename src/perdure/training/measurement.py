"""Accuracy of the models of a run on some tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perdure.contract.evaluation import Evaluation
from perdure.data.streams import Task
from perdure.training.experiment import Experiment
from perdure.training.state import RunState


def measure(experiment: Experiment, state: RunState, tasks: Sequence[Task]) -> list[Evaluation]:
    """Return the accuracy on each task.

    If all tasks of the stream have the same outputs, a predicted task restricts nothing: there is
    no routed accuracy then, although tasks are predicted.
    """
    evaluations = experiment.engine.evaluate(experiment.evaluators(state), list(tasks))
    if not experiment.network.outputs.same_for_all_tasks:
        return evaluations
    return [_without_routed(evaluation) for evaluation in evaluations]


def _without_routed(evaluation: Evaluation) -> Evaluation:
    return replace(evaluation, accuracy={**evaluation.accuracy, "routed": None})
