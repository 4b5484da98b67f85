"""A client's local work: its batches, its loss, its gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from perdure.config import TrainConfig, parse
from perdure.engines.work import Job, Plan, batch_plan, noise_key
from perdure.federation.experiment import Experiment, prepare
from perdure.methods.base import Client, Method, Place, Shard
from perdure.rng import Draws


def client(rows: int, number: int = 0, round_: int = 0, task: int = 0) -> Client:
    """A client with the row numbers 100, 107, 114, ..."""
    none: Any = None
    place = Place(none, Draws(0), task, 1, round_, 1, 0.1)
    shard = Shard(none, 100 + 7 * torch.arange(rows), none, None)
    return Client(number, place, shard, {}, 1.0, {}, {}, {})


def rows_of(plan: Plan) -> list[list[int]]:
    return [batch.tolist() for batch in plan]


@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 50),
    epochs=st.integers(1, 4),
    cap=st.none() | st.integers(1, 30),
)
def test_every_row_once_an_epoch_until_the_cap(
    rows: int, size: int, epochs: int, cap: int | None
) -> None:
    worker = client(rows)
    plan = batch_plan(worker, TrainConfig(local_epochs=epochs, batch_size=size, max_steps=cap))
    batches, steps = rows_of(plan), -(-rows // size)
    assert len(batches) == len(plan) == min(epochs * steps, cap or epochs * steps)
    assert list(map(len, batches)) == plan.sizes
    for first in range(0, len(batches) - steps + 1, steps):
        epoch = batches[first : first + steps]
        assert sorted(chain.from_iterable(epoch)) == worker.shard.index.tolist()
        assert all(len(batch) == size for batch in epoch[:-1])
    if len(batches) % steps:  # a capped epoch
        last = list(chain.from_iterable(batches[len(batches) // steps * steps :]))
        assert len(set(last)) == len(last)


def test_padding_is_a_row_of_the_client() -> None:
    plan = batch_plan(client(5), TrainConfig(batch_size=4))
    assert tuple(plan.rows.shape) == (2, 4)
    assert plan.sizes == [4, 1]
    assert set(plan.rows.flatten().tolist()) <= set(client(5).shard.index.tolist())


def test_batches_are_shuffled_anew_for_every_epoch_round_task_and_client() -> None:
    train = TrainConfig(batch_size=30, local_epochs=2)
    workers = [client(30), client(30, number=1), client(30, round_=1), client(30, task=1)]
    orders = [tuple(b) for worker in workers for b in rows_of(batch_plan(worker, train))]
    assert len(set(orders)) == len(orders) == 8


def test_batches_are_the_same_when_asked_again() -> None:
    train = TrainConfig(batch_size=4, local_epochs=2)
    plans = [batch_plan(client(9, 3, 2, 1), train) for _ in range(2)]
    assert torch.equal(plans[0].rows, plans[1].rows)


def test_a_cap_does_not_change_the_batches_before_it() -> None:
    whole = rows_of(batch_plan(client(10), TrainConfig(batch_size=3, local_epochs=3)))
    for cap in range(1, 12):
        capped = TrainConfig(batch_size=3, local_epochs=3, max_steps=cap)
        assert rows_of(batch_plan(client(10), capped)) == whole[:cap]


@pytest.mark.parametrize("cap", [None, 5])
def test_each_step_says_its_epoch(cap: int | None) -> None:
    train = TrainConfig(batch_size=4, local_epochs=3, max_steps=cap)
    assert batch_plan(client(5), train).epochs.tolist() == [0, 0, 1, 1, 2, 2][:cap]


def test_noise_differs_by_client_round_and_task() -> None:
    keys = {noise_key(client(1, n, r, t)) for n in range(4) for r in range(4) for t in range(4)}
    assert len(keys) == 64
    assert max(keys) + 10**9 < 2**63


VALUES: dict[str, Any] = {
    "data": {"limit": 60},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 2},
    "model": {"hidden": [6]},
    "engine": {"kind": "serial"},
}


def experiment_with(method: str = "fedavg", **train: Any) -> Experiment:
    return prepare(parse({**VALUES, "method": {"kind": method}, "train": train}))


def job_of(experiment: Experiment) -> tuple[Job, Client]:
    state = experiment.start()
    place, params = experiment.place(state), state.server.params
    received = {"params": params}
    job = Job(experiment.method, place, experiment.config.train, params, {}, received)
    return job, experiment.client(0, place, state.server, received)


def plain_loss(params: dict[str, Tensor], x: Tensor, y: Tensor, outputs: list[int]) -> Tensor:
    """The same net and loss in torch's own functions, over some outputs only."""
    hidden = functional.relu(
        functional.linear(x.flatten(1), params["fc1.weight"], params["fc1.bias"])
    )
    logits = functional.linear(hidden, params["head.weight"], params["head.bias"])[:, outputs]
    return functional.cross_entropy(logits, torch.tensor([outputs.index(int(k)) for k in y]))


@pytest.mark.parametrize("kind", ["task", "seen", "all"])
def test_the_loss_is_cross_entropy_among_the_outputs_that_compete(kind: str) -> None:
    experiment = experiment_with(outputs=kind)
    job, worker = job_of(experiment)
    batch = worker.shard.batch(worker.shard.index[:7])
    loss, updates = job.loss(job.params, {}, batch, torch.tensor(0), job.received, {})
    labels = experiment.task(0).train_labels[worker.shard.index[:7]]
    outputs = list(range(10)) if kind == "all" else sorted(experiment.task(0).classes)
    torch.testing.assert_close(loss, plain_loss(job.params, batch.x, labels, outputs))
    assert updates == {}


def test_padding_does_not_count_in_the_loss() -> None:
    job, worker = job_of(experiment_with())
    batch = worker.shard.batch(worker.shard.index[:5])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    masked, _ = job.loss(
        job.params, {}, replace(batch, mask=mask), torch.tensor(0), job.received, {}
    )
    few = worker.shard.batch(worker.shard.index[:3])
    plain, _ = job.loss(job.params, {}, few, torch.tensor(0), job.received, {})
    torch.testing.assert_close(masked, plain)


@dataclass(frozen=True)
class Doubles(Method):
    """A gradient of its own, which sees weight decay and comes before clipping."""

    def gradient(self, grads: Any, params: Any, received: Any, own: Any) -> Any:
        return {name: 2 * g for name, g in grads.items()}


def test_decay_then_the_method_then_clipping() -> None:
    job, _ = job_of(experiment_with(f"{__name__}.Doubles", weight_decay=0.5, clip=0.25))
    assert job.changes_gradient
    params = {"a": torch.tensor([3.0, 0.0])}
    grads = {"a": torch.tensor([0.5, 1.5])}
    found = job.direction(grads, params, {"params": params}, {})["a"]
    full = 2 * (grads["a"] + 0.5 * params["a"])
    torch.testing.assert_close(found, full * (0.25 / full.norm()))
    assert found.norm().item() == pytest.approx(0.25, rel=1e-4)


def test_decoupled_decay_is_not_in_the_gradient() -> None:
    job, _ = job_of(experiment_with(optimizer="adamw", weight_decay=0.5))
    assert not job.changes_gradient
    grads = {"a": torch.ones(1)}
    assert job.direction(grads, {"a": torch.ones(1)}, {"params": {}}, {})["a"].item() == 1.0


@dataclass(frozen=True)
class Penalised(Method):
    """Adds the sum of the first layer's bias."""

    def penalty(self, net: Any, params: Any, batch: Any, received: Any, own: Any) -> Tensor:
        return params["fc1.bias"].sum()


def test_a_penalty_is_added_to_the_loss() -> None:
    plain, worker = job_of(experiment_with())
    job, _ = job_of(experiment_with(f"{__name__}.Penalised"))
    batch, key = worker.shard.batch(worker.shard.index[:4]), torch.tensor(0)
    more, _ = job.loss(job.params, {}, batch, key, job.received, {})
    less, _ = plain.loss(plain.params, {}, batch, key, plain.received, {})
    torch.testing.assert_close(more - less, job.params["fc1.bias"].sum())
