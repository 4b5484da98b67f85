"""Training on a cumulative stream: joint training on all examples so far."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import perdure
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.streams import make_stream
from perdure.runs.trial import dry_run
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task, end_task, next_task
from perdure.training.round import train_round
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "data": {"limit": 60},
    "stream": {"kind": "permuted", "tasks": 2, "cumulative": True},
    "clients": {"count": 1},
    "model": {"hidden": [7], "head": "growing"},
    "train": {"rounds": 1, "batch_size": 1000, "lr": 0.5},
    "engine": {"kind": "serial"},
}
SPLIT = {"kind": "split", "tasks": 3, "classes_per_task": 3, "overlap": 1, "cumulative": True}


def second_task(values: dict[str, Any]) -> tuple[Experiment, RunState]:
    """Return an experiment at the start of its second task."""
    experiment = build_experiment(parse(values))
    state = experiment.initial_state()
    begin_task(experiment, state)
    train_round(experiment, state)
    end_task(experiment, state)
    next_task(state)
    begin_task(experiment, state)
    return experiment, state


def joint_loss(params: dict[str, Tensor], x: Tensor, targets: Tensor) -> Tensor:
    features = torch.relu(F.linear(x.flatten(1), params["fc1.weight"], params["fc1.bias"]))
    heads = [
        F.linear(features, params[f"head.{task}.weight"], params[f"head.{task}.bias"])
        for task in range(2)
    ]
    return F.cross_entropy(torch.cat(heads, 1), targets)


@pytest.mark.parametrize("outputs", [None, "task", "seen"])
def test_a_step_is_one_on_all_examples_and_all_blocks_of_the_head(outputs: str | None) -> None:
    values = VALUES | {"train": VALUES["train"] | {"outputs": outputs}}
    experiment, state = second_task(values)
    before = {name: p.clone().requires_grad_() for name, p in state.server.params.items()}
    train_round(experiment, state)
    plain = parse(values | {"stream": {"kind": "permuted", "tasks": 2}})
    tasks = make_stream(plain, Rng(0)).tasks
    every = torch.arange(60)
    x = torch.cat([task.train.gather(every) for task in tasks])
    targets = torch.cat([task.train.y + 10 * task.index for task in tasks])
    grads = torch.autograd.grad(joint_loss(before, x, targets), list(before.values()))
    for (name, p), grad in zip(before.items(), grads, strict=True):
        torch.testing.assert_close(state.server.params[name], (p - 0.5 * grad).detach(), msg=name)


@pytest.mark.parametrize("head", ["shared", "growing"])
@pytest.mark.parametrize("stream", [VALUES["stream"], SPLIT], ids=["permuted", "split"])
def test_both_engines_train_alike(stream: dict[str, Any], head: str) -> None:
    clients = {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}}
    model, train = {"hidden": [12], "head": head}, {"batch_size": 16, "lr": 0.05}
    values = {"data": {"limit": 160}, "stream": stream, "clients": clients, "model": model}
    trial = dry_run(parse(values | {"train": train}))
    assert trial.stacked
    assert trial.difference < 1e-5, trial.parameter


def test_a_pool_stream_trains_on_the_classes_so_far() -> None:
    """Clients have separate classes, and all classes so far compete."""
    stream = {"kind": "pool", "tasks": 2, "cumulative": True}
    model, train = {"hidden": [7]}, VALUES["train"] | {"outputs": "task"}
    experiment, state = second_task(VALUES | {"stream": stream, "model": model, "train": train})
    active = experiment.plan(state).active_outputs_of(0)
    seen = {label for task in experiment.stream.tasks for label in task.classes}
    assert active is not None
    assert set(active.nonzero().flatten().tolist()) == seen


def test_joint_training_does_not_forget() -> None:
    values = {
        "stream": {"kind": "split", "tasks": 3, "classes_per_task": 3},
        "clients": {"count": 2},
        "model": {"hidden": [40], "head": "growing"},
        "train": {"rounds": 4, "batch_size": 32, "lr": 0.1, "local_epochs": 2},
        "engine": {"kind": "serial"},
    }
    plain = perdure.run(values)
    joint = perdure.run(values | {"stream": values["stream"] | {"cumulative": True}})
    accuracies = [run.metrics["task_agnostic"]["ACC"] for run in (plain, joint)]
    assert accuracies[1] > 0.9
    assert accuracies[1] > accuracies[0] + 0.1


@pytest.mark.parametrize("method", [{"kind": "fot"}, {"kind": "fedavg", "with": [{"kind": "er"}]}])
def test_methods_that_keep_something_of_past_tasks_are_refused(method: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"stream\.cumulative: must be false with this method"):
        build_experiment(parse({"stream": {"cumulative": True}, "method": method}))


def test_nodes_with_local_data_are_refused() -> None:
    federation = {"classes": ["a", "b"], "shape": [1, 8, 8]}
    values = {
        "stream": {"kind": "domains", "tasks": 2, "cumulative": True},
        "data": {"source": "digits", "normalize": False},
        "federation": federation,
        "engine": {"kind": "flower"},
    }
    with pytest.raises(UserError, match=r"stream\.cumulative: must be false in a federation"):
        build_experiment(parse(values))
