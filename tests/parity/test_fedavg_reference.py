"""perdure's FedAvg and FedProx against plain numpy, round by round, on the same batches.

The reference uses only the initial weights, the partition and the order of the batches of perdure:
forward pass, gradient, optimizer, average and accuracy are written out here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perdure.config import Config, parse
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.local_training import batch_schedule
from perdure.training.loop import run_stream
from perdure.training.sampling import remove_dropouts, sample_clients
from perdure.training.state import RunState

Array = np.ndarray[Any, Any]
Model = dict[str, Array]

VALUES: dict[str, Any] = {
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 3},
    "data": {"limit": 400},
    "clients": {"count": 6, "per_round": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [16, 12], "head": "shared"},
    "train": {"rounds": 4, "local_epochs": 2, "batch_size": 10, "lr": 0.1},
}
LAYERS = ("fc1", "fc2", "head")


def forward(model: Model, x: Array) -> list[Array]:
    """The input of each layer and, last, the logits."""
    values = [x]
    for layer in LAYERS:
        x = x @ model[f"{layer}.weight"].T + model[f"{layer}.bias"]
        x = np.maximum(x, 0) if layer != "head" else x
        values.append(x)
    return values


def gradient(model: Model, x: Array, y: Array) -> Model:
    """Of the mean cross-entropy, by back-propagation."""
    values = forward(model, x)
    logits = values[-1] - values[-1].max(1, keepdims=True)
    delta = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    delta[np.arange(len(y)), y] -= 1
    delta /= len(y)
    grads: Model = {}
    for k in reversed(range(len(LAYERS))):
        grads[f"{LAYERS[k]}.weight"] = delta.T @ values[k]
        grads[f"{LAYERS[k]}.bias"] = delta.sum(0)
        delta = (delta @ model[f"{LAYERS[k]}.weight"]) * (values[k] > 0)
    return grads


def local(model: Model, batches: list[tuple[Array, Array]], config: Config, mu: float) -> Model:
    """SGD with momentum and weight decay on the loss plus mu / 2 |w - w_received|^2."""
    train, params = config.train, {name: value.copy() for name, value in model.items()}
    speed = {name: np.zeros_like(value) for name, value in model.items()}
    for x, y in batches:
        grads = gradient(params, x, y)
        for name, g in grads.items():
            g = g + train.weight_decay * params[name] + mu * (params[name] - model[name])
            speed[name] = train.momentum * speed[name] + g
            params[name] = params[name] - train.lr * speed[name]
    return params


def pixels(experiment: Experiment, test: bool) -> Array:
    """All images, normalized by the training set's mean and deviation."""
    task = experiment.task(0)
    train = task.train.rows.numpy().astype(np.float64)
    rows = task.test.rows.numpy().astype(np.float64) if test else train
    return (rows - train.mean()) / train.std()


def clients_of(experiment: Experiment, state: RunState) -> list[tuple[int, list[Array]]]:
    """Return the clients that upload in a round, and the rows of each batch."""
    context, task = experiment.context(state), experiment.task(state.task)
    numbers = remove_dropouts(
        experiment.config, sample_clients(experiment.config, task, context), context
    )
    clients = []
    for number in numbers:
        client = experiment.client(number, context, state.server, {})
        schedule = batch_schedule(client, experiment.config.train)
        clients.append((number, [rows.numpy() for rows in schedule]))
    return clients


def reference_round(model: Model, experiment: Experiment, state: RunState, mu: float) -> Model:
    x, y = pixels(experiment, test=False), experiment.task(0).train.y.numpy()
    models, weights = [], []
    for number, batches in clients_of(experiment, state):
        data = [(x[rows], y[rows]) for rows in batches]
        models.append(local(model, data, experiment.config, mu))
        held = len(experiment.task(state.task).partition.index(number))
        weights.append(held if experiment.config.train.weighting != "uniform" else 1)
    return {name: np.average([m[name] for m in models], 0, weights) for name in model}


def reference_accuracy(model: Model, experiment: Experiment, newest: int) -> dict[str, list[float]]:
    x, y = pixels(experiment, test=True), experiment.task(0).test.y.numpy()
    classes = [list(experiment.task(j).classes) for j in range(newest + 1)]
    seen = [label for own in classes for label in own]
    accuracies: dict[str, list[float]] = {"task_agnostic": [], "task_aware": []}
    for own in classes:
        rows = np.isin(y, own)
        logits = forward(model, x[rows])[-1]
        for mode, among in (("task_agnostic", seen), ("task_aware", own)):
            best = np.array(among)[logits[:, among].argmax(1)]
            accuracies[mode].append(float(np.mean(best == y[rows])))
    return accuracies


WAYS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"kind": "fedavg"}, {}, {}),
    ({"kind": "fedavg"}, {"weighting": "uniform"}, {"dropout": 0.25}),
    ({"kind": "fedavg"}, {"momentum": 0.9, "weight_decay": 0.01, "lr": 0.02}, {}),
    ({"kind": "fedprox", "mu": 0.5}, {}, {}),
    ({"kind": "fedprox", "mu": 0.1}, {"momentum": 0.5, "max_steps": 5}, {}),
]


@pytest.mark.parametrize(("method", "train", "clients"), WAYS, ids=str)
def test_serial_equals_the_reference_after_every_round(
    method: Any, train: Any, clients: Any
) -> None:
    compare(method, train, clients, "serial")


def test_vector_equals_the_reference_after_every_round() -> None:
    compare(*WAYS[3], "vector")


def compare(method: Any, train: Any, clients: Any, engine: str) -> None:
    values = {**VALUES, "method": method, "engine": {"kind": engine}}
    values["train"] = {**VALUES["train"], **train}
    values["clients"] = {**VALUES["clients"], **clients}
    experiment, mu = build_experiment(parse(values)), method.get("mu", 0.0)
    state = experiment.initial_state()
    model = {name: value.double().numpy() for name, value in state.server.params.items()}
    before = RunState(state.server)
    rounds = 0

    def after(state: RunState, event: dict[str, Any]) -> None:
        nonlocal model, rounds
        if event["event"] == "round":
            before.task, before.round = event["task"], event["round"]
            model = reference_round(model, experiment, before, mu)
            rounds += 1
            for name, value in state.server.params.items():
                np.testing.assert_allclose(value.numpy(), model[name], atol=5e-5, rtol=5e-4)
            return
        for mode, row in reference_accuracy(model, experiment, event["task"]).items():
            # one test image in a task may lie on the line between two classes
            np.testing.assert_allclose(event["accuracy"][mode][: len(row)], row, atol=0.011)

    run_stream(experiment, state, after)
    assert rounds == 12
