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
from perdure.contract import (
    Client,
    ClientData,
    Context,
    Exchange,
    Method,
    Prepared,
    Scalar,
    Step,
    Train,
    Transform,
)
from perdure.contract.uploads import Nothing
from perdure.core.rng import Rng
from perdure.core.trees import Tensors
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.local_training import (
    BatchSchedule,
    LocalTraining,
    batch_schedule,
    first_dropout_seed,
)
from perdure.training.task_plan import local_steps


def client(rows: int, number: int = 0, round_: int = 0, task: int = 0) -> Client:
    """A client with the row numbers 100, 107, 114, ..."""
    none: Any = None
    context = Context(none, Rng(0), task, round_, 1, 0.1, 1, 1, {}, ())
    data = ClientData(none, 100 + 7 * torch.arange(rows), none, None)
    return Client(number, context, data, Nothing(), 1.0, {}, {}, {})


def rows_of(schedule: BatchSchedule) -> list[list[int]]:
    return [batch.tolist() for batch in schedule]


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
    train = TrainConfig(local_epochs=epochs, batch_size=size, max_steps=cap)
    schedule = batch_schedule(worker, train)
    batches, steps = rows_of(schedule), -(-rows // size)
    assert len(batches) == len(schedule.sizes) == min(epochs * steps, cap or epochs * steps)
    assert list(map(len, batches)) == schedule.sizes
    assert len(batches) == local_steps(rows, train)
    for first in range(0, len(batches) - steps + 1, steps):
        epoch = batches[first : first + steps]
        assert sorted(chain.from_iterable(epoch)) == worker.data.index.tolist()
        assert all(len(batch) == size for batch in epoch[:-1])
    if len(batches) % steps:  # a capped epoch
        last = list(chain.from_iterable(batches[len(batches) // steps * steps :]))
        assert len(set(last)) == len(last)


def test_padding_is_a_row_of_the_client() -> None:
    schedule = batch_schedule(client(5), TrainConfig(batch_size=4))
    assert tuple(schedule.rows.shape) == (2, 4)
    assert schedule.sizes == [4, 1]
    assert set(schedule.rows.flatten().tolist()) <= set(client(5).data.index.tolist())


def test_batches_are_shuffled_for_every_epoch_round_task_and_client() -> None:
    train = TrainConfig(batch_size=30, local_epochs=2)
    workers = [client(30), client(30, number=1), client(30, round_=1), client(30, task=1)]
    orders = [tuple(b) for worker in workers for b in rows_of(batch_schedule(worker, train))]
    assert len(set(orders)) == len(orders) == 8


def test_batches_are_the_same_when_asked_again() -> None:
    train = TrainConfig(batch_size=4, local_epochs=2)
    schedules = [batch_schedule(client(9, 3, 2, 1), train) for _ in range(2)]
    assert torch.equal(schedules[0].rows, schedules[1].rows)


def test_a_cap_does_not_change_the_batches_before_it() -> None:
    whole = rows_of(batch_schedule(client(10), TrainConfig(batch_size=3, local_epochs=3)))
    for cap in range(1, 12):
        capped = TrainConfig(batch_size=3, local_epochs=3, max_steps=cap)
        assert rows_of(batch_schedule(client(10), capped)) == whole[:cap]


@pytest.mark.parametrize("cap", [None, 5])
def test_each_step_says_its_epoch(cap: int | None) -> None:
    train = TrainConfig(batch_size=4, local_epochs=3, max_steps=cap)
    assert batch_schedule(client(5), train).epochs.tolist() == [0, 0, 1, 1, 2, 2][:cap]


def test_noise_differs_by_client_round_and_task() -> None:
    keys = {
        first_dropout_seed(client(1, n, r, t)) for n in range(4) for r in range(4) for t in range(4)
    }
    assert len(keys) == 64
    assert max(keys) + 10**9 < 2**63


VALUES: dict[str, Any] = {
    "data": {"limit": 60},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 2},
    "model": {"hidden": [6], "head": "shared"},
    "engine": {"kind": "serial"},
}


def experiment_with(method: str = "fedavg", **train: Any) -> Experiment:
    return build_experiment(parse({**VALUES, "method": {"kind": method}, "train": train}))


def work_of(experiment: Experiment) -> tuple[LocalTraining, Client]:
    state = experiment.initial_state()
    context, params = experiment.context(state), state.server.params
    sent, train = {"params": params}, experiment.exchanges(state).train
    training = LocalTraining(train, context, experiment.config.train, params, {}, sent)
    return training, experiment.client(0, context, state.server, sent)


def loss_of(training: LocalTraining, batch: Any) -> tuple[Tensor, Tensors]:
    return training.loss(
        training.params, {}, batch, torch.tensor(0), training.broadcast, Prepared()
    )


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
    training, worker = work_of(experiment)
    batch = worker.data.batch(worker.data.index[:7])
    loss, updates = loss_of(training, batch)
    labels = experiment.task(0).train.y[worker.data.index[:7]]
    outputs = list(range(10)) if kind == "all" else sorted(experiment.task(0).classes)
    torch.testing.assert_close(loss, plain_loss(training.params, batch.x, labels, outputs))
    assert updates == {}


def test_padding_does_not_count_in_the_loss() -> None:
    training, worker = work_of(experiment_with())
    batch = worker.data.batch(worker.data.index[:5])
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])
    masked, _ = loss_of(training, replace(batch, mask=mask))
    plain, _ = loss_of(training, worker.data.batch(worker.data.index[:3]))
    torch.testing.assert_close(masked, plain)


@dataclass(frozen=True)
class Double(Transform):
    """Twice the gradient: it sees weight decay and comes before clipping."""

    def on_gradient(self, grads: Tensors, params: Tensors) -> Tensors:
        return {name: 2 * g for name, g in grads.items()}


def test_decay_then_the_method_then_clipping() -> None:
    training, _ = work_of(experiment_with(weight_decay=0.5, clip=0.25))
    assert training.changes_raw_gradient(())
    params = {"a": torch.tensor([3.0, 0.0])}
    grads = {"a": torch.tensor([0.5, 1.5])}
    found = training.decay_transform_clip(grads, params, {"params": params}, (Double(),))["a"]
    full = 2 * (grads["a"] + 0.5 * params["a"])
    torch.testing.assert_close(found, full * (0.25 / full.norm()))
    assert found.norm().item() == pytest.approx(0.25, rel=1e-4)


def test_decoupled_decay_is_not_in_the_gradient() -> None:
    training, _ = work_of(experiment_with(optimizer="adamw", weight_decay=0.5))
    assert not training.changes_raw_gradient(())
    assert training.changes_raw_gradient((Double(),))
    grads = {"a": torch.ones(1)}
    found = training.decay_transform_clip(grads, {"a": torch.ones(1)}, {"params": {}}, ())
    assert found["a"].item() == 1.0


@dataclass(frozen=True)
class Penalized(Method):
    """Adds the sum of the first layer's bias."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(penalty=self.penalty)]

    def penalty(self, step: Step) -> Scalar:
        return Scalar(step.params["fc1.bias"].sum())


def test_a_penalty_is_added_to_the_loss() -> None:
    plain, worker = work_of(experiment_with())
    training, _ = work_of(experiment_with(f"{__name__}.Penalized"))
    batch = worker.data.batch(worker.data.index[:4])
    more, less = loss_of(training, batch)[0], loss_of(plain, batch)[0]
    torch.testing.assert_close(more - less, training.params["fc1.bias"].sum())
