"""Keys in closed form: the mean direction of a task's queries, from sums over clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from prompt_runs import DIGITS, begun, body, clients_of, small, step_loss
from torch import Tensor

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.models.ops import ForwardPass
from perdure.models.prompts import Prompted
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task, run_stream
from perdure.training.round import train_round
from perdure.training.state import RunState

METHODS: list[dict[str, Any]] = [
    {"kind": "fed-dualp", "keys": "mean"},
    {"kind": "pip", "keys": "mean"},
]


def experiment_of(method: dict[str, Any], **sections: Any) -> Experiment:
    return build_experiment(parse(small(method, **sections)))


def mean_direction(experiment: Experiment, task: int) -> np.ndarray:
    """Return the direction of the mean of all clients' queries of length 1, by numpy."""
    data, clients = experiment.task(task), range(experiment.config.clients.count)
    rows = torch.cat([data.partition.index(client) for client in clients])
    queries = body(experiment).query(data.train.gather(rows), ForwardPass()).double().numpy()
    mean = (queries / np.linalg.norm(queries, axis=1, keepdims=True)).mean(0)
    return mean / np.linalg.norm(mean)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_key_is_the_mean_direction_of_its_tasks_queries(
    method: dict[str, Any], cache: bool
) -> None:
    experiment = experiment_of({**method, "cache": cache})
    state = begun(experiment, rounds=1)
    first = state.server.params["prompt.keys"]
    np.testing.assert_allclose(first[0], mean_direction(experiment, 0), rtol=1e-5, atol=1e-6)
    state.task, state.round = 1, 0
    begin_task(experiment, state)
    both = state.server.params["prompt.keys"]
    np.testing.assert_allclose(both[1], mean_direction(experiment, 1), rtol=1e-5, atol=1e-6)
    others = [slot for slot in range(len(both)) if slot != 1]
    assert torch.equal(both[others], first[others])


def test_every_query_counts_alike_whatever_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backbone that ends in a norm has queries of one length; here some are 100 times longer."""
    experiment = experiment_of({**METHODS[0], "cache": False})
    expected, plain = mean_direction(experiment, 0), Prompted.query

    def stretched(self: Prompted, x: Tensor, fwd: ForwardPass) -> Tensor:
        longest = x.flatten(1).abs().argmax(1, keepdim=True)
        return plain(self, x, fwd) * (1 + 99 * (longest % 2))

    monkeypatch.setattr(Prompted, "query", stretched)
    found = begun(experiment).server.params["prompt.keys"][0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_no_other_key_has_a_smaller_matching_loss() -> None:
    experiment = experiment_of(METHODS[0], clients={"count": 1, "partition": {"kind": "iid"}})
    state = begun(experiment)
    context, server = experiment.context(state), state.server
    client = experiment.client(0, context, server, {"params": server.params})
    batch, generator = client.data.batch(client.data.index), torch.Generator().manual_seed(1)
    best = step_loss(experiment, client, batch)
    for size in (0.01, 0.1, 1.0):
        keys = server.params["prompt.keys"]
        moved = keys + size * torch.randn(keys.shape, generator=generator)
        params = server.params | {"prompt.keys": moved}
        assert step_loss(experiment, client, batch, params=params) > best


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_keys_are_neither_trained_nor_uploaded(method: dict[str, Any]) -> None:
    experiment = experiment_of(method)
    state = begun(experiment)
    before = state.server.params
    train_round(experiment, state)
    after = state.server.params
    assert "prompt.keys" not in experiment.plan(state).sent
    assert torch.equal(after["prompt.keys"], before["prompt.keys"])
    for name in ("prompt.pool", "prompt.general", "head.weight"):
        assert not torch.equal(after[name], before[name])
    assert state.ledger.by_field["up/queries"] > 0


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_sum_that_nobody_can_look_into_is_enough(method: dict[str, Any]) -> None:
    pytest.importorskip("cryptography")
    plain, secure = (
        begun(experiment_of(method, privacy={"secagg": secagg})).server.params["prompt.keys"]
        for secagg in (False, True)
    )
    torch.testing.assert_close(plain, secure, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_engines_agree(method: dict[str, Any]) -> None:
    train = {"rounds": 1, "optimizer": "sgd", "lr": 0.1}
    found = [
        begun(experiment_of(method, engine={"kind": engine}, train=train), rounds=1).server.params
        for engine in ("serial", "vector")
    ]
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_later_tasks_change_no_key() -> None:
    """A pool of one grows; the first two tasks do not depend on a third."""
    found = []
    for tasks in (2, 3):
        stream = {"kind": "split", "tasks": tasks, "classes_per_task": 3}
        experiment = experiment_of({**METHODS[1], "pool": 1}, stream=stream)
        keys: list[torch.Tensor] = []

        def end(state: RunState, event: Any, keys: list[torch.Tensor] = keys) -> None:
            if event["event"] == "task":
                keys.append(state.server.params["prompt.keys"])

        run_stream(experiment, experiment.initial_state(), end)
        found.append(keys)
    assert [len(keys) for keys in found[1]] == [1, 2, 3]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.slow
def test_mean_keys_find_the_task_far_above_chance() -> None:
    """Chance is 1/5; keys that were trained for one step are near it."""
    routing = {}
    for keys in ("learned", "mean"):
        values = DIGITS | {"method": {"kind": "fed-dualp", "keys": keys}}
        experiment = build_experiment(parse(values))
        state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
        routing[keys] = np.mean([value or 0.0 for value in state.routing[-1]])
    assert routing["mean"] > 0.65
    assert routing["mean"] > routing["learned"] + 0.2


def test_features_have_no_prompt_of_a_task_to_come() -> None:
    """A key of a later task that points at the query is not the nearest one yet."""
    experiment = experiment_of({"kind": "fed-dualp"})
    state = begun(experiment)
    client = clients_of(experiment, state)[0]
    batch = client.data.batch(client.data.index[:3])
    queries = body(experiment).query(batch.x, ForwardPass())
    keys = state.server.params["prompt.keys"].clone()
    keys[1:] = queries[0]
    params = state.server.params | {"prompt.keys": keys}
    slot = torch.eye(len(keys))[0]
    expected = body(experiment).features_with(params, batch.x, slot, ForwardPass())
    torch.testing.assert_close(client.features(batch, params), expected)


def test_keys_of_shared_prompts_are_learned() -> None:
    sentence = "method.keys: must be 'learned' with prompt l2p, .*, got 'mean'"
    with pytest.raises(UserError, match=sentence):
        experiment_of({"kind": "pip", "prompt": "l2p", "keys": "mean"})
