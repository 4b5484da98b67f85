"""SCAFFOLD, FedNova and the server optimizers against their papers' formulas in numpy and torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import perdure
from perdure.config import parse
from perdure.contract import CollectedUploads, Context, LocalUpdate, Server
from perdure.core.errors import UserError
from perdure.core.trees import Tensors
from perdure.methods.fedadam import FedAdam
from perdure.methods.fedavgm import FedAvgM, Moments
from perdure.methods.fednova import FedNova, effective_steps
from perdure.methods.fedyogi import FedYogi
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task, run_stream
from perdure.training.round import train_round
from perdure.training.state import RunState

SMALL: dict[str, Any] = {
    "data": {"limit": 120, "test_limit": 40},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [8]},
    "train": {"rounds": 3, "batch_size": 16, "lr": 0.1},
    "engine": {"kind": "serial"},
}


def experiment_of(method: dict[str, Any], **changes: Any) -> Experiment:
    train = {**SMALL["train"], **changes.pop("train", {})}
    return build_experiment(parse({**SMALL, **changes, "train": train, "method": method}))


def final(method: dict[str, Any], **changes: Any) -> Tensors:
    experiment = experiment_of(method, **changes)
    return run_stream(experiment, experiment.initial_state(), lambda s, e: None).server.params


def same(one: Tensors, other: Tensors, atol: float = 1e-6) -> bool:
    return all(torch.allclose(value, other[name], rtol=0, atol=atol) for name, value in one.items())


# ---- SCAFFOLD


def test_scaffold_is_the_papers_algorithm_in_plain_torch() -> None:
    """Two rounds of three clients of four, option II, against a separate loop."""
    clients = {"count": 4, "per_round": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}}
    changes = {"clients": clients, "train": {"rounds": 2, "server_lr": 0.7}}
    experiment = experiment_of({"kind": "scaffold"}, **changes)
    state = experiment.initial_state()
    begin_task(experiment, state)
    x = {name: value.clone() for name, value in state.server.params.items()}
    c = {name: torch.zeros_like(value) for name, value in x.items()}
    own = {client: dict(c) for client in range(4)}
    for _ in range(2):
        x, c = _plain_round(experiment, state, x, c, own)
        train_round(experiment, state)
        assert same(state.server.params, x)
        assert same(state.server.state.control, c)
        for client in own:
            if experiment.store.get(client):
                assert same(experiment.client_state(client)[0].control, own[client])


def _plain_round(
    experiment: Experiment, state: RunState, x: Tensors, c: Tensors, own: dict[int, Tensors]
) -> tuple[Tensors, Tensors]:
    from perdure.training.local_training import batch_schedule
    from perdure.training.sampling import sample_clients

    context = experiment.context(state)
    sampled = sample_clients(experiment.config, experiment.task(0), context)
    moves, changes = [], []
    for number in sampled:
        client = experiment.client(number, context, Server(x), {"params": x, "control": c})
        y, steps = {n: v.clone() for n, v in x.items()}, 0
        for rows in batch_schedule(client, experiment.config.train):
            batch, steps = client.data.batch(rows), steps + 1
            leaves = {n: v.requires_grad_() for n, v in y.items()}
            loss = F.cross_entropy(_mlp(leaves, batch.x), batch.y)
            grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
            y = {n: (v - 0.1 * (grads[n] - own[number][n] + c[n])).detach() for n, v in y.items()}
        new = {n: own[number][n] - c[n] + (x[n] - y[n]) / (steps * 0.1) for n in x}
        changes.append({n: new[n] - own[number][n] for n in x})
        moves.append({n: y[n] - x[n] for n in x})
        own[number] = new
    after = {n: x[n] + 0.7 * sum(m[n] for m in moves) / len(moves) for n in x}
    return after, {n: c[n] + sum(d[n] for d in changes) / 4 for n in c}


def _mlp(params: Tensors, x: torch.Tensor) -> torch.Tensor:
    hidden = F.relu(F.linear(x.flatten(1), params["fc1.weight"], params["fc1.bias"]))
    return F.linear(hidden, params["head.weight"], params["head.bias"])


def test_scaffold_with_all_clients_keeps_c_at_their_mean() -> None:
    experiment = experiment_of({"kind": "scaffold"})
    state = run_stream(experiment, experiment.initial_state(), lambda s, e: None)
    each = [experiment.client_state(client)[0] for client in range(4)]
    assert {control.task for control in each} == {1}  # reset in the second task
    for name, value in state.server.state.control.items():
        mean = sum(control.control[name] for control in each) / 4
        torch.testing.assert_close(value, mean, rtol=0, atol=1e-6)
    assert any(value.abs().max() > 1e-4 for value in state.server.state.control.values())


def test_scaffolds_first_round_is_fedavg_with_plain_means() -> None:
    train, stream = {"rounds": 1}, {"kind": "permuted", "tasks": 1}
    scaffold = final({"kind": "scaffold"}, train=train, stream=stream)
    fedavg = final({"kind": "fedavg"}, train={**train, "weighting": "uniform"}, stream=stream)
    assert same(scaffold, fedavg)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"optimizer": "adam"}, "train.optimizer: must be sgd with scaffold, got 'adam'"),
        ({"momentum": 0.5}, "train.momentum: must be 0 with scaffold, got 0.5"),
        ({"clip": 1.0}, "train.clip: must be null with scaffold, got 1.0"),
    ],
)
def test_scaffold_refuses_all_but_plain_sgd(train: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        experiment_of({"kind": "scaffold"}, train=train)


# ---- FedNova


def test_fednova_with_equal_steps_is_fedavg() -> None:
    train = {"max_steps": 2}
    assert same(final({"kind": "fednova"}, train=train), final({"kind": "fedavg"}, train=train))
    assert not same(final({"kind": "fednova"}), final({"kind": "fedavg"}), atol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fednova_by_numpy(momentum: float) -> None:
    experiment = experiment_of({"kind": "fedavg"}, train={"momentum": momentum})
    state = experiment.initial_state()
    context = experiment.context(state)
    clients = [experiment.client(n, context, state.server, {}) for n in range(3)]
    assert len({client.steps for client in clients}) > 1
    worth = [_worth(client.steps, momentum) for client in clients]
    assert [effective_steps(client) for client in clients] == pytest.approx(worth)
    updates = np.random.default_rng(0).normal(size=(3, 5))
    local = LocalUpdate({"w": torch.tensor(updates)}, {})
    fields = FedNova().normalize(clients, local).fields
    p = np.array([client.weight for client in clients])
    p = p / p.sum()
    uploads = CollectedUploads(
        {n: {k: torch.tensor(np.tensordot(p, v, 1)) for k, v in f.value.items()}
         for n, f in fields.items()},
        {"update": 1.0, "steps": 1.0},
    )  # fmt: skip
    update = FedNova().rescale(Server({}), uploads, context)["w"]
    expected = (p @ worth) * sum(w * u / a for w, u, a in zip(p, updates, worth, strict=True))
    np.testing.assert_allclose(update, expected, rtol=1e-5)


def _worth(steps: int, momentum: float) -> float:
    """How often each gradient counts in the sum of a client's steps, one by one."""
    return sum(sum(momentum**j for j in range(steps - i)) for i in range(steps))


def test_fednova_refuses_adaptive_optimizers() -> None:
    with pytest.raises(UserError, match=r"train.optimizer: must be sgd with fednova, got 'adam'"):
        experiment_of({"kind": "fednova"}, train={"optimizer": "adam"})


# ---- optimizers on the server

UPDATES = np.random.default_rng(1).normal(size=(4, 6))


def steps_of(method: Any) -> list[np.ndarray]:
    """The directions that a method takes for UPDATES, one after the other."""
    context: Any = None
    server, found = Server({}, {}, Moments()), []
    for update in UPDATES:
        uploads = CollectedUploads({"update": {"w": torch.tensor(update)}}, {"update": 1.0})
        found.append(method.combine(server, uploads, context)["w"].numpy())
        change = perdure.Change({}, {}, server.state)
        server = replace(server, state=method.store_moments(server, change, uploads, context).state)
    return found


def test_fedavgm_by_numpy() -> None:
    m = np.zeros(6)
    for update, step in zip(UPDATES, steps_of(FedAvgM(momentum=0.8)), strict=True):
        m = 0.8 * m + update
        np.testing.assert_allclose(step, m)
    assert FedAvgM().momentum == 0.9


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_adaptive_servers_by_numpy(kind: Any) -> None:
    beta1, beta2, tau = 0.7, 0.95, 0.01
    m, v = np.zeros(6), np.full(6, tau**2)
    for d, step in zip(UPDATES, steps_of(kind(beta1=beta1, beta2=beta2, tau=tau)), strict=True):
        m = beta1 * m + (1 - beta1) * d
        if kind is FedAdam:
            v = beta2 * v + (1 - beta2) * d**2
        else:
            v = v - (1 - beta2) * d**2 * np.sign(v - d**2)
        np.testing.assert_allclose(step, m / (np.sqrt(v) + tau))


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_the_papers_defaults(kind: Any) -> None:
    method = kind()
    assert (method.beta1, method.beta2, method.tau) == (0.9, 0.99, 1e-3)
    assert not method.keep_moments
    assert method.needs.prefers.server_lr == 0.03


def test_without_momentum_fedavgm_is_fedavg() -> None:
    assert same(final({"kind": "fedavgm", "momentum": 0}), final({"kind": "fedavg"}))
    assert not same(final({"kind": "fedavgm"}), final({"kind": "fedavg"}), atol=1e-3)


@pytest.mark.parametrize("keep", [False, True])
def test_moments_are_reset_in_each_task_unless_kept(keep: bool) -> None:
    experiment = experiment_of({"kind": "fedavgm", "keep_moments": keep})
    state = experiment.initial_state()
    begin_task(experiment, state)
    train_round(experiment, state)
    assert state.server.state.first
    state.task, state.round = 1, 0
    begin_task(experiment, state)
    assert bool(state.server.state.first) is keep


@pytest.mark.parametrize("kind", ["fedavg", "fedadam", "fedavgm", "fot"])
def test_the_servers_step_size_scales_the_first_step(kind: str) -> None:
    stream, train = {"kind": "permuted", "tasks": 1}, {"rounds": 1}
    start = experiment_of({"kind": kind}).initial_state().server.params
    one, half = (
        final({"kind": kind}, stream=stream, train={**train, "server_lr": lr}) for lr in (1.0, 0.5)
    )
    for name, value in start.items():
        torch.testing.assert_close(
            half[name] - value, (one[name] - value) / 2, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(("schedule", "factor"), [("1/k", 1 / 3), ("1/sqrt(k)", 3**-0.5)])
def test_the_servers_step_size_follows_its_schedule(schedule: str, factor: float) -> None:
    train = {"server_schedule": schedule, "server_lr": 0.5}
    experiment = experiment_of({"kind": "fedavg"}, stream={"tasks": 3}, train=train)
    params = experiment.initial_state().server.params
    sizes = [experiment.plan_task(task, params).server_lr for task in (0, 2)]
    assert sizes == pytest.approx([0.5, 0.5 * factor])
    assert isinstance(experiment.plan_task(0, params).context, Context)
