"""Fed-L2P and Fed-DualP: what is trained, what travels, and how a run is resumed and exported."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prompt_runs import begun, body, clients_of, small, step_loss

import perdure
from perdure.config import parse
from perdure.contract import Batch
from perdure.core.errors import UserError
from perdure.models.ops import ForwardPass
from perdure.models.prompts import Prompted
from perdure.training.engines import traced_steps as steps
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task, evaluate, run_stream
from perdure.training.round import train_round
from perdure.training.state import RunState

METHODS: list[dict[str, Any]] = [
    {"kind": "fed-dualp"},
    {"kind": "fed-l2p", "top": 2},
    {"kind": "pip"},
    {"kind": "pip", "prompt": "l2p", "average_head": "task_end"},
    {"kind": "fed-dualp", "pool": 1},
]


def experiment_of(method: dict[str, Any], **sections: Any) -> Experiment:
    return build_experiment(parse(small(method, **sections)))


def trained(method: dict[str, Any], **sections: Any) -> tuple[Experiment, RunState]:
    experiment = experiment_of(method, **sections)
    return experiment, run_stream(experiment, experiment.initial_state(), lambda *_: None)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_the_backbone_is_not_a_parameter_and_does_not_change(method: dict[str, Any]) -> None:
    experiment = experiment_of(method)
    before = {name: value.clone() for name, value in body(experiment).constants.items()}
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    assert all(name.startswith(("prompt.", "head.")) for name in state.server.params)
    for name, value in body(experiment).constants.items():
        assert torch.equal(value, before[name]), name
    assert not any("frozen" in field for field in state.ledger.by_field)


def test_fed_dualp_trains_the_tasks_own_prompt_only() -> None:
    experiment = experiment_of({"kind": "fed-dualp", "pool": 3})
    state = experiment.initial_state()
    for task in range(2):
        state.task, state.round = task, 0
        begin_task(experiment, state)
        before = state.server.params
        train_round(experiment, state)
        after, others = state.server.params, [slot for slot in range(3) if slot != task]
        for name in ("prompt.pool", "prompt.keys"):
            assert torch.equal(before[name][others], after[name][others])
            assert not torch.equal(before[name][task], after[name][task])
        assert not torch.equal(before["prompt.general"], after["prompt.general"])
        foreign = [c for c in range(10) if c not in experiment.task(task).classes]
        assert torch.equal(before["head.weight"][foreign], after["head.weight"][foreign])


def test_the_copy_is_made_once_per_task() -> None:
    experiment = experiment_of({"kind": "fed-dualp"})
    state = begun(experiment, rounds=2)
    state.task, state.round = 1, 0
    begin_task(experiment, state)
    pool = state.server.params["prompt.pool"]
    assert torch.equal(pool[0], pool[1])
    for _ in range(2):
        train_round(experiment, state)
    after = state.server.params["prompt.pool"]
    assert torch.equal(after[0], pool[0])
    assert not torch.equal(after[1], pool[1])


@pytest.mark.parametrize("method", METHODS[:2], ids=str)
def test_the_loss_is_cross_entropy_among_the_tasks_classes_and_the_cosine(
    method: dict[str, Any],
) -> None:
    experiment = experiment_of({**method, "lambda": 0.3})
    client = clients_of(experiment, begun(experiment))[0]
    batch, params = client.data.batch(client.data.index[:6]), client.params
    found = step_loss(experiment, client, batch)

    here = body(experiment)
    query = here.query(batch.x, ForwardPass()).numpy()
    keys = params["prompt.keys"].numpy()
    cosine = (query @ keys.T) / np.linalg.norm(query, axis=1)[:, None]
    cosine /= np.linalg.norm(keys, axis=1)
    if method["kind"] == "fed-dualp":
        match = cosine[:, 0]
        choice = torch.eye(len(keys))[0]
    else:
        match = np.sort(cosine, axis=1)[:, -2:].sum(1)
        choice = here.prompts.choose(torch.from_numpy(cosine))
    features = here.features_with(params, batch.x, choice, ForwardPass()).numpy()
    logits = features @ params["head.weight"].numpy().T + params["head.bias"].numpy()
    classes = list(experiment.task(0).classes)
    among = logits[:, classes] - logits[:, classes].max(1, keepdims=True)
    log_p = among - np.log(np.exp(among).sum(1, keepdims=True))
    places = [classes.index(label) for label in batch.y.tolist()]
    expected = -log_p[np.arange(6), places].mean() - 0.3 * match.mean()
    assert float(found) == pytest.approx(expected, rel=1e-4)


def test_padding_rows_do_not_count() -> None:
    experiment = experiment_of({"kind": "fed-l2p"})
    client = clients_of(experiment, begun(experiment))[0]
    few, more = (client.data.batch(client.data.index[:n]) for n in (4, 7))
    padded = replace(more, mask=torch.tensor([1.0] * 4 + [0.0] * 3))
    losses = [step_loss(experiment, client, batch) for batch in (few, padded)]
    torch.testing.assert_close(*losses)
    assert not torch.isclose(step_loss(experiment, client, more), losses[0])


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_engines_agree(method: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    train = {"rounds": 1, "max_steps": 2 if method["kind"] != "pip" or "prompt" in method else 4}
    found = [trained(method, engine={"kind": e}, train=train)[1] for e in ("serial", "vector")]
    for name, value in found[0].server.params.items():
        other = found[1].server.params[name]
        torch.testing.assert_close(value, other, rtol=1e-3, atol=2e-3, msg=name)
    assert found[0].ledger.by_field == found[1].ledger.by_field
    assert not any("cannot be stacked" in record.message for record in caplog.records)


@pytest.mark.slow
def test_engines_inject_the_same_prototypes_in_the_same_epoch() -> None:
    """Clients of unequal size: in one step of a stack they are in different epochs."""
    clients = {"partition": {"kind": "classes", "fraction": 0.4, "disjoint": True}}
    train = {"local_epochs": 3, "batch_size": 5, "max_steps": None, "optimizer": "sgd", "lr": 0.1}
    found, sizes = [], set()
    for engine in ("serial", "vector"):
        values = small({"kind": "pip"}, engine={"kind": engine}, train=train, clients=clients)
        experiment = build_experiment(parse(values))
        sizes |= {-(-int(size) // 5) for size in experiment.task(0).partition.sizes}
        found.append(begun(experiment, rounds=2).server.params)
    assert len(sizes) > 1
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["shared", "growing"])
def test_recorded_steps_serve_in_later_tasks(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared head: one recording without prototypes and one with them; and the same model."""
    recorded, record = [], steps.trace

    def counted(step: Any, inputs: Any) -> Any:
        recorded.append(1)
        return record(step, inputs)

    monkeypatch.setattr(steps, "trace", counted)
    train = {"batch_size": 8, "local_epochs": 2, "max_steps": 4, "optimizer": "sgd", "lr": 0.1}
    found = [
        trained({"kind": "pip"}, engine={"kind": engine}, train=train, model={"head": head})[1]
        for engine in ("serial", "vector")
    ]
    for name, value in found[0].server.params.items():
        other = found[1].server.params[name]
        torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5, msg=name)
    assert len(recorded) == (2 if head == "shared" else 4)


@pytest.mark.parametrize("method", METHODS[:3], ids=str)
def test_queries_that_are_kept_change_nothing(method: dict[str, Any]) -> None:
    runs = [trained({**method, "cache": cache}) for cache in (True, False)]
    assert runs[0][0].task(0).train.cached_features is not None
    assert runs[1][0].task(0).train.cached_features is None
    for name, value in runs[0][1].server.params.items():
        torch.testing.assert_close(value, runs[1][1].server.params[name], rtol=1e-3, atol=1e-4)
    assert runs[0][1].matrix == runs[1][1].matrix


def test_each_row_is_predicted_with_the_expert_that_its_query_chooses() -> None:
    experiment = experiment_of({"kind": "fed-dualp"})
    state, here = experiment.initial_state(), body(experiment)
    for state.task in range(2):
        begin_task(experiment, state)
    x = experiment.task(0).test.gather(experiment.task(0).groups[0].index[:3])
    queries, params = here.query(x, ForwardPass()), dict(state.server.params)
    keys, pool = params["prompt.keys"].clone(), params["prompt.pool"]
    keys[1], keys[0], keys[2] = queries  # the third row is nearest to a task that has not come
    params["prompt.keys"] = keys
    params["prompt.pool"] = torch.randn(pool.shape, generator=torch.Generator().manual_seed(1))
    server = replace(state.server, params=params)
    found = experiment.method.predict(server, x, experiment.network)
    cosine = torch.nn.functional.cosine_similarity(queries[2], keys[:2], dim=1)
    slots = torch.eye(len(keys))
    for row, slot in enumerate([1, 0, int(cosine.argmax())]):
        one = x[row : row + 1]
        features = [
            here.features_with(params, one, slots[each], ForwardPass()) for each in range(3)
        ]
        by_slot = [experiment.network.classify(params, f, ForwardPass())[0] for f in features]
        torch.testing.assert_close(found[row], by_slot[slot])
        for other in {0, 1, 2} - {slot}:
            assert not torch.allclose(found[row], by_slot[other], atol=1e-3)


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_a_client_trains_on_from_its_own_head(engine: str) -> None:
    """With steps that hardly move it, a head that only the client has is still there after."""
    train = {"rounds": 3, "optimizer": "sgd", "lr": 1e-6}
    method = {"kind": "pip", "average_head": "task_end"}
    experiment = experiment_of(method, train=train, engine={"kind": engine})
    state = begun(experiment, rounds=1)
    for client in range(3):
        kept, _ = experiment.client_state(client)
        assert set(kept.head) == {"head.weight", "head.bias"}
        head = {n: torch.full_like(v, 1.0 + client) for n, v in kept.head.items()}
        experiment.store_client_state(client, replace(kept, head=head), {})
    train_round(experiment, state)
    for client in range(3):
        for value in experiment.client_state(client)[0].head.values():
            torch.testing.assert_close(
                value, torch.full_like(value, 1.0 + client), atol=1e-3, rtol=0
            )
    assert float(state.server.params["head.weight"].abs().max()) < 0.9


def test_dual_prompts_route_and_l2p_does_not() -> None:
    experiment = experiment_of({"kind": "fed-dualp"})
    state = experiment.initial_state()
    for task in range(2):
        state.task, state.round = task, 0
        begin_task(experiment, state)
    # keys that are the mean query of their task's test rows; an untrained one that fits better
    params = dict(state.server.params)
    keys = params["prompt.keys"].clone()
    rows = [
        experiment.task(t).test.gather_cached(experiment.task(t).groups[0].index) for t in range(2)
    ]
    queries = [torch.nn.functional.normalize(part, dim=1) for part in rows if part is not None]
    centre = torch.cat(queries).mean(0)
    keys[0], keys[1] = queries[0].mean(0) - centre, queries[1].mean(0) - centre
    keys[2] = centre
    state.server = replace(state.server, params=params | {"prompt.keys": keys})
    for task in range(2):
        index = experiment.task(task).groups[0].index
        x = experiment.task(task).test.gather(index)
        route = experiment.method.route(state.server, x, experiment.network)
        cosine = torch.nn.functional.cosine_similarity(rows[task][:, None], keys[None, :2], dim=2)
        assert torch.equal(route.argmax(1), cosine.argmax(1))
    event = evaluate(experiment, state)
    assert all(share is not None for share in event["accuracy"]["routed"][:2])
    _, after = trained({"kind": "fed-l2p"})
    assert after.matrix["routed"] == [[None, None]] * 2


@pytest.mark.parametrize("pool", [10, 1])
def test_an_exported_model_predicts_as_the_run_was_judged(pool: int, tmp_path: Path) -> None:
    """Also with a pool that has grown beyond the number in the config."""
    method = {"kind": "pip", "pool": pool}
    result = perdure.run(small(method, train={"rounds": 3}), out=tmp_path / "run")
    experiment = experiment_of(method)
    model = perdure.load(tmp_path / "run")
    assert len(model.server.params["prompt.keys"]) == max(pool, 2)
    routed = []
    for task in experiment.stream.tasks:
        index = task.groups[0].index
        images = task.test.rows[index].reshape(-1, 1, 8, 8).numpy()
        told = torch.from_numpy(model.predict(images))
        routed.append(float((told == task.test.y[index]).float().mean()))
    assert routed == pytest.approx(result.matrix["routed"][-1], abs=1e-6)
    size = (tmp_path / "run" / "model" / "model.safetensors").stat().st_size
    assert size < 4 * sum(v.numel() for v in model.server.params.values()) + 8000


class Stopped(BaseException):
    """Stands for Ctrl-C at some point."""


@pytest.mark.slow
@pytest.mark.parametrize("method", [METHODS[0], METHODS[3], METHODS[4]], ids=str)
def test_a_run_stopped_after_each_step_has_the_same_result(
    method: dict[str, Any], tmp_path: Path
) -> None:
    """Participations and heads that clients keep are a part of what is resumed."""

    def stop(state: Any, event: Any) -> None:
        raise Stopped

    config = small(method, clients={"per_round": 2}, train={"max_steps": 1})
    perdure.run(config, out=tmp_path / "whole")
    with pytest.raises(Stopped):
        perdure.run(config, out=tmp_path / "run", watch=stop)
    for _ in range(4):
        with pytest.raises(Stopped):
            perdure.resume(tmp_path / "run", watch=stop)
    perdure.resume(tmp_path / "run")
    outcomes = [
        json.loads((tmp_path / run / "result.json").read_text()) for run in ("whole", "run")
    ]
    for name in ("model_sha256", "matrix", "metrics", "bytes", "client_updates"):
        assert outcomes[0][name] == outcomes[1][name], name


@pytest.mark.parametrize(
    ("method", "sections", "sentence"),
    [
        (
            {"kind": "pip"},
            {"model": {"kind": "mlp"}},
            "model.kind: must be vit or text with prompts",
        ),
        (
            {"kind": "pip"},
            {"stream": {"kind": "pool"}},
            "stream.kind: must be domains, permuted, split with this method, got 'pool'",
        ),
        (
            {"kind": "pip"},
            {"train": {"weight_decay": 0.1}},
            "train.weight_decay: must be 0 with prompts, since it would shrink those of earlier "
            "tasks, got 0.1",
        ),
        (
            {"kind": "pip"},
            {"model": {"train_layers": 2}},
            "model.train_layers: must be null with prompts, since the backbone is not trained, "
            "got 2",
        ),
        (
            {"kind": "pip"},
            {"model": {"depth": 4}},
            "method.expert_layers: must be different blocks of the backbone, from 0 to 3, got "
            "[2, 3, 4]",
        ),
        (
            {"kind": "fed-dualp", "length": 6},
            {},
            "method.length: must be 1 to 5, the tokens of the backbone's sequence, got 6",
        ),
        (
            {"kind": "fed-dualp", "expert_layers": [1, 2]},
            {},
            "method.expert_layers: must be blocks that method.general_layers does not name, got "
            "[1, 2]",
        ),
        (
            {"kind": "fed-dualp", "general_layers": [9]},
            {},
            "method.general_layers: must be different blocks of the backbone, from 0 to 4, got [9]",
        ),
        (
            {"kind": "fed-dualp", "general_layers": [0, 0]},
            {},
            "method.general_layers: must be different blocks of the backbone, from 0 to 4, got "
            "[0, 0]",
        ),
        (
            {"kind": "pip"},
            {"train": {"weighting": "uniform"}},
            "train.weighting: must be null or 'samples' with pip, since method.weighted sets the "
            "clients' weights, got 'uniform'",
        ),
        (
            {"kind": "pip"},
            {"privacy": {"clip": 1.0}},
            "method.prototypes: must be false with privacy.clip, since noise would make prototypes "
            "of classes that no client has, got True",
        ),
        (
            {"kind": "pip", "prototypes": False},
            {"privacy": {"clip": 1.0}},
            "method.weighted: must be false with privacy.clip, since it requires equal weights, "
            "got True",
        ),
        (
            {"kind": "fed-l2p", "pool": 3},
            {},
            "method.top: must be 1 to 3 (method.pool), got 5",
        ),
        (
            {"kind": "fed-dualp", "with": [{"kind": "fed-l2p"}]},
            {},
            "method.with: must be methods of which one at most has its own predict_features, got "
            "'fed-dualp' and 'fed-l2p'",
        ),
        (
            {"kind": "fed-dualp", "with": [{"kind": "ewc"}]},
            {},
            "method.with: must be methods that do not need trained layers, which 'fed-dualp' "
            "freezes, got 'ewc'",
        ),
        (
            {"kind": "fot", "with": [{"kind": "fed-l2p"}]},
            {},
            "method.with: must be methods that do not need trained layers, which 'fed-l2p' "
            "freezes, got 'fot'",
        ),
        (
            {"kind": "gpm", "with": [{"kind": "fed-dualp"}]},
            {},
            "method.with: must be methods that do not need trained layers, which 'fed-dualp' "
            "freezes, got 'gpm'",
        ),
    ],
    ids=str,
)
def test_a_config_that_prompts_cannot_run_is_refused_in_one_sentence(
    method: dict[str, Any], sections: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        experiment_of(method, **sections)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_pool_that_had_to_grow_trains_the_new_prompt() -> None:
    """It begins as the previous expert, with a separate key; nothing else of the pool moves."""
    experiment = experiment_of({"kind": "fed-dualp", "pool": 1})
    state = begun(experiment, rounds=1)
    first = state.server.params
    assert [len(first[name]) for name in ("prompt.pool", "prompt.keys")] == [1, 1]
    state.task, state.round = 1, 0
    begin_task(experiment, state)
    before = state.server.params
    for name in ("prompt.pool", "prompt.keys"):
        assert torch.equal(before[name][:1], first[name])
    assert torch.equal(before["prompt.pool"][1], before["prompt.pool"][0])
    assert not torch.isclose(before["prompt.keys"][1], before["prompt.keys"][0]).any()
    train_round(experiment, state)
    for name in ("prompt.pool", "prompt.keys"):
        after = state.server.params[name]
        assert len(after) == 2
        assert torch.equal(after[0], before[name][0])
        assert not torch.isclose(after[1], before[name][1]).all()


def test_a_pool_of_l2p_never_grows() -> None:
    experiment, state = trained({"kind": "fed-l2p", "pool": 1, "top": 1})
    assert experiment.task_count == 2
    assert len(state.server.params["prompt.keys"]) == 1


@pytest.mark.parametrize("kind", ["fed-dualp", "pip"])
def test_three_tasks_are_the_first_three_of_five(kind: str) -> None:
    """A pool of two grows once or three times; what is to come changes no bit."""
    found: dict[int, list[Any]] = {}
    for tasks in (3, 5):
        stream = {"kind": "split", "tasks": tasks, "classes_per_task": 2}
        train = {"rounds": 1, "max_steps": 1}
        experiment = experiment_of({"kind": kind, "pool": 2}, stream=stream, train=train)
        ends: list[Any] = []

        def end(state: RunState, event: Any, ends: list[Any] = ends) -> None:
            if event["event"] == "task":
                ends.append((state.server.params, event["accuracy"], event["bytes"]))

        run_stream(experiment, experiment.initial_state(), end)
        found[tasks] = ends
    assert [len(params["prompt.keys"]) for params, _, _ in found[5]] == [2, 2, 3, 4, 5]
    for (params, accuracy, sent), (wanted, expected, expected_sent) in zip(
        found[3], found[5], strict=False
    ):
        assert params.keys() == wanted.keys()
        for name, value in params.items():
            assert torch.equal(value, wanted[name]), name
        assert sent == expected_sent
        assert {n: row[:3] for n, row in accuracy.items()} == {
            n: row[:3] for n, row in expected.items()
        }


@pytest.mark.parametrize("pool", [10, 1])
def test_an_anchor_can_hold_prompts_too(pool: int) -> None:
    method = {"kind": "fed-dualp", "pool": pool, "with": [{"kind": "special", "lambda": 0.5}]}
    experiment, state = trained(method)
    assert isinstance(experiment.network.body, Prompted)
    assert state.task == 2


def test_an_anchor_holds_the_expert_that_the_task_takes_over_in_either_order() -> None:
    prompts, anchor = {"kind": "fed-dualp"}, {"kind": "special", "lambda": 0.5}
    for method in (prompts | {"with": [anchor]}, anchor | {"with": [prompts]}):
        experiment = experiment_of(method)
        state = experiment.initial_state()
        for state.task in range(2):
            begin_task(experiment, state)
        pool = state.server.state.special.anchor.params["prompt.pool"]
        assert torch.equal(pool[1], pool[0])
        assert torch.equal(pool, state.server.params["prompt.pool"])


def test_queries_of_one_batch_are_not_used_for_another() -> None:
    experiment = experiment_of({"kind": "fed-dualp"})
    batch = Batch(torch.zeros(1, 1, 8, 8), torch.zeros(1), cached_features=torch.ones(1, 8))
    wrapped = experiment.network.with_cached_features(batch.cached_features).body
    assert isinstance(wrapped, Prompted)
    assert wrapped.cached_queries is batch.cached_features
    assert body(experiment).cached_queries is None
