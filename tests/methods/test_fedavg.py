"""FedAvg: special cases in which it must be something simpler."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import perdure
from perdure.config import parse
from perdure.contract import Method, Needs, Nothing, Preferences, Train
from perdure.core.trees import Tensors
from perdure.methods.fedavg import FedAvg
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream

VALUES: dict[str, Any] = {
    "data": {"limit": 100},
    "stream": {"tasks": 1},
    "model": {"hidden": [8]},
    "engine": {"kind": "serial"},
}


def trained(values: dict[str, Any]) -> tuple[Experiment, Tensors]:
    experiment = build_experiment(parse({**VALUES, **values}))
    return experiment, run_stream(
        experiment, experiment.initial_state(), lambda *_: None
    ).server.params


def whole_gradient(experiment: Experiment, params: Tensors) -> Tensors:
    """Of the mean loss over all rows, by torch's own functions."""
    task = experiment.task(0)
    x, y = task.train.gather(torch.arange(len(task.train.y))), task.train.y
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    hidden = functional.linear(x.flatten(1), leaves["fc1.weight"], leaves["fc1.bias"]).relu()
    logits = functional.linear(hidden, leaves["head.weight"], leaves["head.bias"])
    grads = torch.autograd.grad(functional.cross_entropy(logits, y), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def test_full_batches_and_one_step_are_gradient_descent_on_all_data() -> None:
    """Weighted by samples, the mean of the clients' gradients is the gradient of the whole."""
    clients = {"count": 7, "partition": {"kind": "dirichlet", "alpha": 0.2}}
    experiment, params = trained({"clients": clients, "train": {"rounds": 5, "batch_size": 1000}})
    assert len(set(experiment.task(0).partition.sizes)) > 1
    wanted = experiment.initial_state().server.params
    for _ in range(5):
        grads = whole_gradient(experiment, wanted)
        wanted = {name: value - 0.1 * grads[name] for name, value in wanted.items()}
    for name, value in params.items():
        torch.testing.assert_close(value, wanted[name], atol=1e-5, rtol=1e-4)


def test_clients_with_the_same_data_and_one_batch_agree_with_one_client() -> None:
    everything = {"kind": "classes", "fraction": 1.0, "disjoint": False}
    train = {"rounds": 2, "batch_size": 1000, "local_epochs": 3}
    _, many = trained({"clients": {"count": 3, "partition": everything}, "train": train})
    _, one = trained({"clients": {"count": 1}, "train": train})
    for name, value in many.items():
        torch.testing.assert_close(value, one[name], atol=1e-5, rtol=1e-4)


def test_it_is_the_contracts_defaults_but_for_its_preferences() -> None:
    described = ("title", "family", "idea", "paper")
    own = [n for n in vars(Method) if not n.startswith("_") and n not in described]
    assert {"needs", "exchanges", "predict", "ServerState", "ClientState"} <= set(own)
    own_values = [name for name in own if getattr(FedAvg, name) is not getattr(Method, name)]
    assert own_values == ["needs"]


def test_nothing_is_declared_besides_training() -> None:
    experiment = build_experiment(parse(VALUES))
    context = experiment.context(experiment.initial_state())
    assert FedAvg().exchanges(context) == [Train()]
    assert FedAvg().needs == Needs(prefers=Preferences({"split": "growing"}), cumulative=True)
    assert FedAvg.ServerState is FedAvg.ClientState is Nothing


def test_it_forgets() -> None:
    """What the other methods are for: classes of the first task are lost when others follow."""
    stream = {"kind": "split", "tasks": 2, "classes_per_task": 5}
    values = {**VALUES, "data": {}, "stream": stream, "train": {"rounds": 8, "batch_size": 16}}
    model = {"hidden": [8], "head": "shared"}
    matrix = perdure.run({**values, "model": model}).matrix["task_agnostic"]
    assert matrix[0][0] > 0.8
    assert matrix[1][1] > 0.7
    assert matrix[1][0] < 0.3
