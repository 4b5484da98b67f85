"""GPM on FedAvg: bases of their own, which never leave the clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from subspace_runs import clients_of, experiment_of, next_task, train_task

from perdure.algebra.subspaces import extend
from perdure.engines.serial import train_client
from perdure.engines.work import Job
from perdure.errors import UserError
from perdure.federation.loop import begin_task
from perdure.methods import build
from perdure.methods.gpm import GPM
from perdure.trees import subtract


def test_bases_by_numpy_over_two_tasks() -> None:
    """The rule of Saha et al. on the input layer, written out with numpy."""
    experiment = experiment_of({"kind": "gpm", "threshold": 0.8})
    state = experiment.start()
    known = {number: np.zeros((64, 0)) for number in range(4)}
    for task in range(2):
        train_task(experiment, state)
        for client in clients_of(experiment, state, {}):
            x = np.concatenate([b.x.flatten(1).numpy() for b in client.shard.batches()])
            x = x.T.astype(float)
            old = known[client.id]
            left, s, _ = np.linalg.svd(x - old @ old.T @ x, full_matrices=False)
            covered = 1 - (s**2).sum() / (x**2).sum()
            rank = 0
            while covered < 0.8:
                covered += s[rank] ** 2 / (x**2).sum()
                rank += 1
            known[client.id] = np.concatenate([old, left[:, :rank]], axis=1)
            ours = experiment.store.get(client.id)["bases"]["fc1.weight"].double().numpy()
            assert ours.shape == known[client.id].shape
            expected = known[client.id] @ known[client.id].T
            np.testing.assert_allclose(ours @ ours.T, expected, atol=1e-4)
        if task == 0:
            next_task(state)


@pytest.mark.parametrize("train", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}], ids=str)
def test_local_steps_stay_out_of_a_clients_own_space(train: dict[str, object]) -> None:
    experiment = experiment_of({"kind": "gpm", "threshold": 0.8}, train=train)
    state = experiment.start()
    train_task(experiment, state)
    next_task(state)
    begin_task(experiment, state)
    place, bases = experiment.place(state), []
    for client in clients_of(experiment, state, {})[:2]:
        job = Job(
            experiment.method, place, experiment.config.train, client.params, {}, client.received
        )
        change = subtract(train_client(job, client)[0], client.params)
        for name, basis in client.kept["bases"].items():
            step = change[name].double()
            assert float((step @ basis.double()).norm() / step.norm()) < 2e-5
        bases.append(client.kept["bases"]["fc1.weight"])
    assert extend(bases[0], bases[1]).shape[1] > bases[0].shape[1]  # clients differ


def test_nothing_of_the_bases_is_sent() -> None:
    experiment = experiment_of({"kind": "gpm"})
    state = experiment.start()
    train_task(experiment, state)
    assert set(state.ledger.by_field) == {"down/params", "up/update"}


def test_padding_is_no_direction() -> None:
    """Zero columns leave the projection as it is, and a client without bases unprojected."""
    experiment = experiment_of({"kind": "gpm"})
    state = experiment.start()
    train_task(experiment, state)
    next_task(state)
    begin_task(experiment, state)
    client = clients_of(experiment, state, {})[0]
    own = experiment.method.prepare(client)
    grads = {name: torch.randn(client.params[name].shape) for name in own}
    ours = experiment.method.gradient(grads, {}, {}, own)
    for name, basis in client.kept["bases"].items():
        b = basis.double().numpy()
        expected = grads[name].double().numpy() @ (np.eye(len(b)) - b @ b.T)
        np.testing.assert_allclose(ours[name], expected, atol=1e-5)
    fresh = type(client)(**{**client.__dict__, "kept": {}})
    own = experiment.method.prepare(fresh)
    assert all(not value.any() for value in own.values())


def test_bad_values_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"method.threshold"):
        build({"kind": "gpm", "threshold": -1})
    assert GPM(threshold=0.9, threshold_increment=0.2).threshold_at(1) == 1.0
