"""Single: each task's model is that of the task alone, and answers for its task."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import perdure
from perdure.config import parse
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "data": {"limit": 90},
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 3},
    "clients": {"count": 1},
    "model": {"hidden": [9]},
    "train": {"rounds": 1, "batch_size": 1000, "lr": 0.5},
    "method": {"kind": "single"},
    "engine": {"kind": "serial"},
}


def trained(values: dict[str, Any]) -> tuple[Experiment, RunState]:
    experiment = build_experiment(parse(values))
    return experiment, run_stream(experiment, experiment.initial_state(), lambda state, event: None)


@pytest.mark.parametrize("kind", ["split", "permuted"])
def test_every_task_is_one_step_from_the_initial_weights(kind: str) -> None:
    experiment, state = trained(VALUES | {"stream": {"kind": kind, "tasks": 3}})
    assert len(state.server.state.finished) == 3
    for task, model in zip(experiment.stream.tasks, state.server.state.finished, strict=True):
        params = {
            n: p.requires_grad_() for n, p in experiment.initial_state().server.params.items()
        }
        rows = task.partition.index(0)
        x, y = task.train.gather(rows).flatten(1), task.train.y[rows]
        hidden = torch.relu(F.linear(x, params["fc1.weight"], params["fc1.bias"]))
        logits = F.linear(hidden, params["head.weight"], params["head.bias"])
        other = [label for label in range(10) if label not in task.classes]
        logits[:, other] = float("-inf")
        grads = torch.autograd.grad(F.cross_entropy(logits, y), list(params.values()))
        for (name, p), grad in zip(params.items(), grads, strict=True):
            torch.testing.assert_close(model.params[name], (p - 0.5 * grad).detach(), msg=name)


@pytest.mark.parametrize("model", [{"hidden": [9]}, {"hidden": [9], "head": "growing"}])
@pytest.mark.parametrize("kind", ["split", "permuted"])
def test_nothing_is_forgotten_if_the_task_is_given(kind: str, model: dict[str, Any]) -> None:
    stream = {"kind": kind, "tasks": 3}
    result = perdure.run(VALUES | {"stream": stream, "model": model})
    matrix = result.values["matrix"]["task_aware"]
    for task in range(3):
        assert len({row[task] for row in matrix[task:]}) == 1
    assert result.metrics["task_aware"]["FGT"] == 0


@pytest.mark.parametrize("model", [{"hidden": [9]}, {"hidden": [9], "head": "growing"}])
def test_without_a_task_the_most_certain_model_answers(model: dict[str, Any]) -> None:
    experiment, state = trained(VALUES | {"model": model})
    network, outputs = experiment.network_at(2), experiment.network.outputs
    task = experiment.task(1)
    x = task.test.gather(torch.arange(40))
    found = experiment.method.predict(state.server, x, network).argmax(1)
    labels = outputs.output_labels(2)[found]
    certain = torch.zeros(40)
    answers = torch.full((40,), -1)
    for number, finished in enumerate(state.server.state.finished):
        params, head = finished.params, "head" if "head" not in model else f"head.{number}"
        hidden = torch.relu(F.linear(x.flatten(1), params["fc1.weight"], params["fc1.bias"]))
        logits = F.linear(hidden, params[f"{head}.weight"], params[f"{head}.bias"])
        classes = torch.tensor(experiment.task(number).classes)
        chosen = logits if "head" in model else logits[:, classes]
        top = chosen.softmax(1).max(1)
        better = top.values > certain
        answers[better] = classes[top.indices[better]]
        certain = torch.maximum(certain, top.values)
    assert torch.equal(labels, answers)


def test_batch_norm_starts_again_too() -> None:
    model = {"kind": "conv", "width": 2, "norm": "batch"}
    experiment, state = trained(VALUES | {"model": model})
    finished, initial = state.server.state.finished, experiment.initial_state().server.buffers
    for name, value in initial.items():
        if name.endswith("running_mean"):
            moved = [model.buffers[name] - value for model in finished]
            assert all(step.abs().sum() > 0 for step in moved)
            assert not torch.equal(moved[0], moved[1])


def test_a_trained_model_answers_with_all_models(tmp_path: Any) -> None:
    run = perdure.run(VALUES, out=tmp_path / "run")
    experiment, state = trained(VALUES)
    model = perdure.load(tmp_path / "run")
    x = experiment.task(0).test.rows[:20].view(-1, 1, 8, 8)
    expected = experiment.method.predict(
        state.server, experiment.task(0).test.gather(torch.arange(20)), experiment.network
    )
    labels = experiment.network.outputs.output_labels(2)[expected.argmax(1)]
    assert run.metrics["task_aware"]["ACC"] > 0
    assert torch.equal(torch.as_tensor(model.predict(x)), labels)
