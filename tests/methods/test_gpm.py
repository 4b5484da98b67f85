"""GPM on FedAvg: each client has its own bases, which never leave it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from subspace_runs import (
    clients_of,
    experiment_of,
    local_change,
    next_task,
    second_task,
    train_task,
)

from perdure.algebra.subspaces import extend_basis
from perdure.core.errors import UserError
from perdure.methods.gpm import GPM, LocalBases
from perdure.methods.registry import build
from perdure.training.engines.traced_steps import StackedTransforms


def test_bases_by_numpy_over_two_tasks() -> None:
    """The rule of Saha et al. on the input layer, written out with numpy."""
    experiment = experiment_of({"kind": "gpm", "threshold": 0.8})
    state = experiment.initial_state()
    known = {number: np.zeros((64, 0)) for number in range(4)}
    for task in range(2):
        train_task(experiment, state)
        for client in clients_of(experiment, state, {}):
            x = np.concatenate([b.x.flatten(1).numpy() for b in client.data.batches()])
            x = x.T.astype(float)
            old = known[client.id]
            left, s, _ = np.linalg.svd(x - old @ old.T @ x, full_matrices=False)
            covered = 1 - (s**2).sum() / (x**2).sum()
            rank = 0
            while covered < 0.8:
                covered += s[rank] ** 2 / (x**2).sum()
                rank += 1
            known[client.id] = np.concatenate([old, left[:, :rank]], axis=1)
            ours = client.state.bases["fc1.weight"].double().numpy()
            assert ours.shape == known[client.id].shape
            expected = known[client.id] @ known[client.id].T
            np.testing.assert_allclose(ours @ ours.T, expected, atol=1e-4)
        if task == 0:
            next_task(state)


@pytest.mark.parametrize("train", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.01}], ids=str)
def test_local_steps_stay_out_of_a_clients_own_space(train: dict[str, object]) -> None:
    experiment, state = second_task({"kind": "gpm", "threshold": 0.8}, train=train)
    bases = []
    for client in clients_of(experiment, state, {})[:2]:
        change = local_change(experiment, state, client, {})
        for name, basis in client.state.bases.items():
            step = change[name].double()
            assert float((step @ basis.double()).norm() / step.norm()) < 2e-5
        bases.append(client.state.bases["fc1.weight"])
    assert extend_basis(bases[0], bases[1]).shape[1] > bases[0].shape[1]  # clients differ


def test_nothing_of_the_bases_is_sent() -> None:
    experiment = experiment_of({"kind": "gpm"})
    state = experiment.initial_state()
    train_task(experiment, state)
    assert set(state.ledger.by_field) == {"down/params", "up/update"}
    assert set(experiment.client_state(0)[0].bases) == {"fc1.weight", "fc2.weight", "head.weight"}


def test_each_client_of_a_stack_is_projected_by_its_own_bases() -> None:
    """Zero columns that even out the ranks are no directions; nor has a new client any."""
    experiment, state = second_task({"kind": "gpm"})
    clients = clients_of(experiment, state, {})[:2]
    clients.append(replace(clients[0], state=LocalBases()))
    rows = [experiment.method.project_steps(client).transforms for client in clients]
    ranks = {client.state.bases["fc2.weight"].shape[1] for client in clients[:2]}
    assert len(ranks) == 2
    grads = {n: torch.randn(3, *clients[0].params[n].shape) for n in clients[0].state.bases}
    stack = StackedTransforms(rows, frozenset())
    ours = torch.vmap(
        lambda g, own: stack.build(stack.shared, own)[0].on_gradient(g, {}), in_dims=(0, 0)
    )(grads, stack.stacked)
    for number, client in enumerate(clients):
        for name, gradient in grads.items():
            g = gradient[number].double().numpy()
            b = client.state.bases.get(name, torch.zeros(g.shape[1], 0)).double().numpy()
            np.testing.assert_allclose(ours[name][number], g - g @ b @ b.T, atol=1e-5)


def test_bad_values_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"method.threshold"):
        build({"kind": "gpm", "threshold": -1})
    assert GPM(threshold=0.9, threshold_increment=0.2).threshold_at(1) == 1.0
