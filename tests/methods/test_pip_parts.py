"""PIP with heads that are never averaged, and PIP beside other methods."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from prompt_runs import DIGITS, begun, body, clients_of, prepared, small

from perdure.config import parse
from perdure.contract import Client, ClientResult, LocalUpdate, Sum
from perdure.core.errors import UserError
from perdure.core.trees import Tensors
from perdure.methods.pip import Pip
from perdure.models.ops import ForwardPass
from perdure.models.prompts import DualPrompts
from perdure.runs.trial import dry_run
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task, end_task, evaluate, next_task
from perdure.training.round import train_round

NEVER = {"kind": "pip", "average_head": "never"}
OTHERS: list[dict[str, Any]] = [
    {"kind": "special", "lambda": 0.5},
    {"kind": "special-c", "lambda": 0.5},
    {"kind": "fedprox"},
    {"kind": "fedavgm"},
    {"kind": "fedadam"},
    {"kind": "fedyogi"},
    {"kind": "calibrate"},
]


def experiment_of(method: dict[str, Any], **sections: Any) -> Experiment:
    return build_experiment(parse(small(method, **sections)))


# ---- heads that are never averaged


def private_head(experiment: Experiment, client: int) -> Tensors:
    return experiment.client_state(client)[1]


def test_a_head_that_is_never_averaged_stays_with_its_client() -> None:
    experiment = experiment_of(NEVER)
    state = begun(experiment)
    before = state.server.params
    train_round(experiment, state)
    after = state.server.params
    assert torch.equal(after["head.weight"], before["head.weight"])
    assert not torch.equal(after["prompt.pool"], before["prompt.pool"])
    heads = [private_head(experiment, client) for client in range(3)]
    assert all(set(head) == {"head.weight", "head.bias"} for head in heads)
    assert not torch.equal(heads[0]["head.weight"], heads[1]["head.weight"])
    client = clients_of(experiment, state)[1]
    start = prepared(experiment, client).initial_params
    assert torch.equal(start["head.weight"], heads[1]["head.weight"])
    size = sum(v.numel() for n, v in after.items() if not n.startswith("head."))
    assert state.ledger.by_field["up/update"] / 3 <= 4 * size + 600


@pytest.mark.slow
def test_without_a_common_head_accuracy_is_the_mean_over_clients() -> None:
    """Each client's head on the common prompts, by numpy."""
    train = {**DIGITS["train"], "max_steps": 10}
    experiment = build_experiment(parse({**DIGITS, "train": train, "method": NEVER}))
    state = begun(experiment, rounds=1)
    end_task(experiment, state)
    event = evaluate(experiment, state)
    task, classes = experiment.task(0), list(experiment.task(0).classes)
    rows = torch.cat([group.index for group in task.groups])
    slot = torch.eye(len(state.server.params["prompt.keys"]))[0]
    features = body(experiment).features_with(
        state.server.params, task.test.gather(rows), slot, ForwardPass()
    )
    right = []
    for client in range(4):
        head = {n: v.double().numpy() for n, v in private_head(experiment, client).items()}
        logits = features.double().numpy() @ head["head.weight"].T + head["head.bias"]
        found = np.array(classes)[logits[:, classes].argmax(1)]
        right.append(np.mean(found == task.test.y[rows].numpy()))
    assert len(set(right)) > 1
    assert event["accuracy"]["task_agnostic"][0] == pytest.approx(np.mean(right))


def test_a_client_keeps_the_heads_of_all_its_tasks() -> None:
    experiment = experiment_of(NEVER, model={"head": "growing"})
    state = begun(experiment, rounds=2)
    first = private_head(experiment, 0)
    assert set(first) == {"head.0.weight", "head.0.bias"}
    next_task(state)
    begin_task(experiment, state)
    train_round(experiment, state)
    both = private_head(experiment, 0)
    assert set(both) == {f"head.{task}.{name}" for task in (0, 1) for name in ("weight", "bias")}
    assert torch.equal(both["head.0.weight"], first["head.0.weight"])


def test_engines_agree_on_heads_that_are_never_averaged() -> None:
    train = {"rounds": 1, "optimizer": "sgd", "lr": 0.1}
    found = []
    for engine in ("serial", "vector"):
        experiment = experiment_of(NEVER, engine={"kind": engine}, train=train)
        params = begun(experiment, rounds=1).server.params
        found.append({**params, **private_head(experiment, 2)})
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5, msg=name)


# ---- prefixes before the projections


@pytest.mark.parametrize("kind", ["fed-dualp", "pip"])
def test_prefixes_before_the_projections_train_alike_on_both_engines(kind: str) -> None:
    values = small({"kind": kind, "prefix": "before"}, train={"optimizer": "sgd", "lr": 0.05})
    assert body(build_experiment(parse(values))).prompts == DualPrompts(projected=True)
    trial = dry_run(parse(values))
    assert trial.stacked
    assert trial.difference < 1e-5, trial.parameter


# ---- beside other methods


@pytest.mark.parametrize("options", [{}, {"keys": "mean", "pool": 1}, {"average_head": "never"}])
@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other["kind"])
def test_pip_trains_beside_other_methods_in_either_order(
    other: dict[str, Any], options: dict[str, Any]
) -> None:
    pip = {"kind": "pip", **options}
    for method in (pip | {"with": [other]}, other | {"with": [pip]}):
        trial = dry_run(parse(small(method, train={"optimizer": "sgd", "lr": 0.05})))
        assert trial.stacked
        assert trial.difference < 1e-5, trial.parameter


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other["kind"])
def test_the_weights_of_a_combination_are_omega(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside methods that would weight clients equally."""
    weights: dict[int, float] = {}
    upload = Pip.upload

    def recorded(self: Pip, client: Client, local: LocalUpdate) -> ClientResult:
        weights[client.id] = 2.0 * len(client.data) / 2  # by the second round
        return upload(self, client, local)

    monkeypatch.setattr(Pip, "upload", recorded)
    clients = {"partition": {"kind": "dirichlet", "alpha": 0.3}}
    experiment = experiment_of({"kind": "pip", "with": [other]}, clients=clients)
    state = begun(experiment, rounds=1)
    make_upload = experiment.plan(state).exchanges.train.make_upload
    assert make_upload is not None
    for client in clients_of(experiment, state):
        change = {name: torch.zeros_like(value) for name, value in client.params.items()}
        field = make_upload(client, LocalUpdate(change, {})).fields["update"]
        assert isinstance(field, Sum)
        assert field.weight == weights[client.id]
    assert len(set(weights.values())) > 1
    assert experiment.weighting == "samples"
    assert experiment.needs.max_client_weight == 2.0


def test_an_anchor_pulls_the_weighted_mean() -> None:
    """SPECIAL's eq. 6 on PIP's eqs. 12 and 13: the same round without the anchor, then the pull."""
    found = []
    for beside in ([], [{"kind": "special", "lambda": 0.5}]):
        train = {"server_schedule": "constant"}
        experiment = experiment_of({"kind": "pip", "with": beside}, train=train)
        state = begun(experiment, rounds=2)
        next_task(state)
        begin_task(experiment, state)
        anchor = state.server.params
        train_round(experiment, state)
        found.append((anchor, state.server.params))
    (anchor, mean), (same, pulled) = found
    for name, value in mean.items():
        assert torch.equal(anchor[name], same[name])
        torch.testing.assert_close(pulled[name], (value + 0.5 * anchor[name]) / 1.5)


def test_secure_sums_have_room_for_omega_in_a_combination() -> None:
    most = int(2 * experiment_of({"kind": "pip"}).task(0).partition.sizes.max())
    privacy = {"secagg": True, "bits": 32, "precision": 30}
    method = {"kind": "pip", "with": [{"kind": "special"}]}
    with pytest.raises(UserError, match=f"weights up to {most}, got 30$"):
        experiment_of(method, privacy=privacy)


@pytest.mark.parametrize("kind", ["fedavgm", "fedadam", "fedyogi"])
def test_moments_that_are_kept_grow_with_the_pool(kind: str) -> None:
    """Those of a new expert are the initial ones, whatever the experts before have."""
    method = {"kind": "pip", "pool": 2, "with": [{"kind": kind, "keep_moments": True}]}
    stream = {"kind": "split", "tasks": 3, "classes_per_task": 3}
    experiment = experiment_of(method, stream=stream)
    state, moments = begun(experiment, rounds=1), []
    for _ in range(2):
        next_task(state)
        begin_task(experiment, state)
        train_round(experiment, state)
        moments.append(getattr(state.server.state, kind).first["prompt.pool"])
    old, new = moments
    assert (len(old), len(new)) == (2, 3)
    torch.testing.assert_close(new[:2], 0.9 * old)  # only the new expert is updated in its task
    assert new[2].any()


def test_heads_of_clients_are_shared_by_no_combination() -> None:
    experiment = experiment_of(NEVER | {"with": [{"kind": "fedadam"}]})
    state = begun(experiment)
    before = state.server.params["head.weight"]
    train_round(experiment, state)
    assert torch.equal(state.server.params["head.weight"], before)
    client = replace(clients_of(experiment, state)[0])
    assert not torch.equal(client.params["head.weight"], before)
