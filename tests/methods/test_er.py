"""Experience replay against computations that share no code with it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from baseline_runs import TINY, client_of, config, experiment, loss_of

import perdure
from perdure.methods.er import Er
from perdure.methods.parts.replay import ReplayMemory, StoredExamples, past_active_outputs
from perdure.models.ops import ForwardPass
from perdure.training.experiment import Experiment


def remembered(
    made: Experiment, budget: int, tasks: int = 3, seed: int | None = None
) -> StoredExamples:
    """A client's memory at the end of some tasks."""
    memory = ReplayMemory()
    for task in range(tasks):
        client = client_of(made, task, state=memory)
        if seed is not None:
            drawn = replace(client.context, rng=type(client.context.rng)(seed))
            client = replace(client, context=drawn)
        result = Er(budget=budget).refill_memory(client)
        assert not result.fields
        assert result.state is not None
        memory = result.state
    assert memory.examples is not None
    return memory.examples


def test_memory_keeps_to_its_budget_and_gives_the_images_back() -> None:
    made = experiment()
    memory = remembered(made, 25)
    assert memory.rows.shape == (25, 64)
    assert memory.rows.dtype == torch.uint8
    assert set(memory.tasks.tolist()) == {0, 1, 2}
    row = int((memory.tasks == 1).nonzero()[0])
    x = memory.rows[row] * memory.scale[1] + memory.shift[1]
    task = made.task(1)
    every = task.train.gather(torch.arange(len(task.train))).flatten(1)
    same = ((every - x).abs().amax(1) < 1e-5).nonzero().flatten()
    assert memory.targets[row] in task.train.y[same]


def test_memory_never_leaves_the_client() -> None:
    client = client_of(experiment())
    _, ending = Er().exchanges(client.context)
    assert not ending.communicates


def test_every_example_stays_with_equal_probability() -> None:
    made = experiment()
    counts = np.zeros(3)
    for seed in range(60):
        memory = remembered(made, 20, seed=seed)
        counts += np.bincount(memory.tasks.numpy(), minlength=3)
    expected = 60 * 20 / 3  # the three tasks have the same number of examples
    deviation = np.sqrt(60 * 20 * (1 / 3) * (2 / 3))
    assert np.abs(counts - expected).max() < 4 * deviation


@pytest.mark.parametrize(("new", "share"), [(5, 0.5), (2, 0.5), (5, 0.8)])
def test_memory_has_its_share_of_the_loss_whatever_the_batch_sizes(new: int, share: float) -> None:
    made = experiment()
    memory = remembered(made, 1, tasks=1)
    client = client_of(made, 1, state=ReplayMemory(memory, 1))
    batch = client.data.batch(client.data.index[:new])
    found = loss_of(made, Er(replay_batch=3, replay_weight=share), client, batch)
    x = memory.rows * memory.scale[0] + memory.shift[0]  # the one row of the memory, three times

    def mean_loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = made.network.logits(client.params, x, ForwardPass())
        return torch.nn.functional.cross_entropy(logits, y)

    stored = mean_loss(x.reshape(1, 1, 8, 8), memory.targets)
    expected = (1 - share) * mean_loss(batch.x, batch.y) + share * stored
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("given", "drawn"), [(None, 16), (3, 3)])
def test_as_many_examples_are_replayed_as_a_batch_has(given: int | None, drawn: int) -> None:
    client = client_of(experiment({"kind": "er"}), 1)
    tensors = Er(replay_batch=given).prepare_memory(client).tensors
    assert client.batch_size == 16
    assert tensors["drawn"].shape == (drawn,)


def test_a_total_budget_is_divided_over_the_clients() -> None:
    made = experiment({"kind": "er"})
    sizes = []
    for number in range(4):
        client = client_of(made, 0, number)
        state = Er(budget=6, budget_scope="total").refill_memory(client).state
        assert state is not None
        sizes.append(0 if state.examples is None else len(state.examples))
    assert sizes == [2, 2, 1, 1]
    none = Er(budget=2, budget_scope="total").refill_memory(client_of(made, 0, 3)).state
    assert none is not None
    assert none.examples is None
    assert Er(budget=6).budget_of(client_of(made)) == 6


def grown(made: Experiment, task: int) -> Any:
    server = made.initial_state().server
    params = server.params
    for number in range(1, task + 1):
        params = made.grow(params, number)
    return replace(server, params=params)


def test_of_a_growing_head_all_outputs_are_trained_and_compete() -> None:
    values = {"stream": {"kind": "split", "tasks": 2}, "model": {"hidden": [8], "head": "growing"}}
    made = experiment({"kind": "er"}, **values)
    server = grown(made, 1)
    plan = made.plan_task(1, server.params)
    assert "head.0.weight" in plan.trainable
    assert plan.active_outputs is not None
    assert plan.active_outputs.all()
    memory = remembered(made, 9, tasks=1)
    client = made.client(0, plan.context, server, {"params": server.params})
    client = replace(client, state=ReplayMemory(memory, 9))
    assert Er().prepare_memory(client).tensors["active_outputs"].all()


def test_with_a_growing_head_replay_keeps_the_tasks_apart() -> None:
    values = {
        "data": {"limit": 500},
        "stream": {"kind": "split", "tasks": 3},
        "model": {"hidden": [24], "head": "growing"},
        "train": {"rounds": 6, "batch_size": 16, "lr": 0.1},
    }
    accuracy = {
        outputs: perdure.run(
            config({"kind": "er"}, **{**values, "train": values["train"] | {"outputs": outputs}})
        ).metrics["task_agnostic"]["ACC"]
        for outputs in (None, "task")
    }
    assert accuracy[None] > accuracy["task"] + 0.1


@pytest.mark.parametrize("refilled", [False, True])
def test_stored_batches_stand_for_all_examples_of_earlier_tasks(refilled: bool) -> None:
    made = experiment()
    state = ReplayMemory()
    for task in range(3 if refilled else 2):
        state = Er(budget=25).refill_memory(client_of(made, task, state=state)).state
    client = client_of(made, 2, state=state)
    batches = list(state.stored_batches(client))
    memory = state.examples
    assert memory is not None
    earlier = memory.tasks < 2
    assert torch.equal(torch.cat([b.y for b in batches]), memory.targets[earlier])
    x = memory.rows * memory.scale[memory.tasks] + memory.shift[memory.tasks]
    torch.testing.assert_close(torch.cat([b.x for b in batches]).flatten(1), x[earlier])
    seen = sum(len(client_of(made, task).data) for task in range(2))
    assert float(sum(b.weight.sum() for b in batches)) == pytest.approx(seen)  # type: ignore[union-attr]


def test_empty_memory_adds_nothing() -> None:
    made = experiment({"kind": "er"})
    client = client_of(made, 1)
    batch = client.data.batch(client.data.index[:5])
    found = loss_of(made, Er(), client, batch)
    logits = made.network.logits(client.params, batch.x, ForwardPass())
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, batch.y))


def test_replayed_rows_compete_as_their_task_did_or_as_today() -> None:
    own_task = torch.tensor([[True, True, False]])
    seen, task = torch.tensor([True, True, True, True]), torch.tensor([False, False, True, True])
    assert past_active_outputs(own_task, seen).tolist() == [[True, True, True, True]]
    assert past_active_outputs(own_task, task).tolist() == [[True, True, False, False]]
    both = past_active_outputs(own_task.expand(2, 1, 3), torch.stack([seen, task]).unsqueeze(1))
    assert both.tolist() == [[[True] * 4], [[True, True, False, False]]]


def test_a_longer_memory_knows_the_outputs_of_each_task() -> None:
    made = experiment(
        stream={"kind": "split", "tasks": 3}, model={"hidden": [8], "head": "growing"}
    )
    memory = remembered(made, 30)
    assert memory.active_outputs is not None
    outputs = [mask.nonzero().flatten().tolist() for mask in memory.active_outputs]
    firsts = [made.network.outputs.first_output(task) for task in range(4)]
    assert outputs == [list(range(a, b)) for a, b in pairwise(firsts)]
    allowed = memory.active_outputs[memory.tasks, memory.targets]
    assert allowed.all()


def test_replay_prevents_forgetting() -> None:
    more = {"train": TINY["train"] | {"rounds": 6}, "data": {"limit": 400}}
    plain, replayed = (
        perdure.run(config({"kind": kind}, **more)).metrics["task_agnostic"]["BWT"]
        for kind in ("fedavg", "er")
    )
    assert replayed > plain
