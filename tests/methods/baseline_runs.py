"""Small runs and single steps of EWC, ER, LwF and FLwF-2T, for their tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from perdure.config import parse
from perdure.contract import Batch, Client, Method, Train
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.local_training import LocalTraining
from perdure.training.loop import run_stream

TINY = {
    "data": {"limit": 240},
    "stream": {"kind": "permuted", "tasks": 3},
    "clients": {"count": 4, "per_round": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [8]},
    "train": {"rounds": 2, "batch_size": 16, "lr": 0.1},
}


def config(method: dict[str, Any], engine: str = "serial", **more: Any) -> dict[str, Any]:
    return {**TINY, **more, "method": method, "engine": {"kind": engine}}


def client_of(experiment: Experiment, task: int = 0, number: int = 0, **more: Any) -> Client:
    server = experiment.initial_state().server
    context = experiment.task_context(task, server.params)
    found = experiment.client(number, context, server, {"params": server.params})
    return replace(found, **more)


def experiment(method: dict[str, Any] | None = None, **more: Any) -> Experiment:
    return build_experiment(parse(config(method or {"kind": "fedavg"}, **more)))


def train_of(method: Method, client: Client) -> Train:
    (train,) = (x for x in method.exchanges(client.context) if isinstance(x, Train))
    return train


def loss_of(
    made: Experiment, method: Method, client: Client, batch: Batch, params: Any = None
) -> torch.Tensor:
    """The loss of one local step of a client, by default of the model that it received."""
    training = LocalTraining(
        train_of(method, client), client.context, made.config.train, client.params, client.buffers,
        client.broadcast,
    )  # fmt: skip
    local, key = training.prepare_client(client), torch.tensor(7)
    params = client.params if params is None else params
    found, _ = training.loss(params, client.buffers, batch, key, client.broadcast, local)
    return found


def final_models(method: dict[str, Any], **more: Any) -> list[dict[str, torch.Tensor]]:
    """The final models of a short run on the serial and on the vector engine."""
    models = []
    for engine in ("serial", "vector"):
        made = build_experiment(parse(config(method, engine, **more)))
        models.append(run_stream(made, made.initial_state(), lambda *_: None).server.params)
    return models
