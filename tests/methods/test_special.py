"""SPECIAL and SPECIAL-C against their closed forms, computed apart in numpy."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import perdure
from perdure.config import parse
from perdure.contract import (
    Change,
    Client,
    CollectedUploads,
    Context,
    Diagnosis,
    Prepared,
    Server,
    Train,
)
from perdure.core.errors import UserError
from perdure.methods.parts.previous_model import AnchorState, PreviousModel
from perdure.methods.registry import build
from perdure.methods.special import Special
from perdure.methods.special_c import SpecialC
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream
from perdure.training.task_plan import server_step_size

Vector = dict[str, torch.Tensor]

TINY = {
    "data": {"limit": 240},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 4, "per_round": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [12]},
    "train": {"rounds": 3, "batch_size": 16, "lr": 0.1},
}


def config(method: dict[str, Any], engine: str = "serial", **more: Any) -> dict[str, Any]:
    return {**TINY, **more, "method": method, "engine": {"kind": engine}}


@cache
def plain_experiment() -> Experiment:
    return build_experiment(parse(config({"kind": "fedavg"})))


def context(task: int) -> Context:
    experiment = plain_experiment()
    return replace(experiment.context(experiment.initial_state()), task=task)


def vector(*values: float) -> Vector:
    return {"w": torch.tensor(values, dtype=torch.float64)}


def anchored(params: Vector, anchor: Vector, **more: Any) -> Server:
    return Server(params, state=AnchorState(PreviousModel(anchor), **more))


def adjusted(
    method: Special, server: Server, update: Vector, task: int = 1, fraction: float = 1.0
) -> Change:
    uploads = CollectedUploads(upload_fraction=fraction)
    return method.adjust(server, Change(update, {}, server.state), uploads, context(task))


def after(server: Server, change: Change) -> Server:
    return Server({"w": server.params["w"] + change.params["w"]}, state=change.state)


def test_equation_6_by_hand() -> None:
    method = Special(lambda_=0.5)
    server = anchored(vector(2.0, 0.0), vector(1.0, 1.0))
    change = adjusted(method, server, vector(1.0, -1.0))
    # What = (3, -1); (3 + 0.5, -1 + 0.5) / 1.5 = (7/3, -1/3)
    torch.testing.assert_close(after(server, change).params["w"], vector(7 / 3, -1 / 3)["w"])


def test_equation_6_minimizes_equation_5() -> None:
    rng = np.random.default_rng(0)
    w, step, anchor = (rng.normal(size=5) for _ in range(3))
    method = Special(lambda_=0.3)
    change = adjusted(method, anchored(vector(*w), vector(*anchor)), vector(*step))
    found = w + change.params["w"].numpy()

    def objective(x: np.ndarray) -> float:
        return float(0.5 * ((x - w - step) ** 2).sum() + 0.15 * ((x - anchor) ** 2).sum())

    best = objective(found)
    assert all(objective(found + 1e-3 * rng.normal(size=5)) > best for _ in range(50))


@pytest.mark.parametrize(
    ("train", "factor"),
    [
        ({}, 1.0),
        ({"server_schedule": "1/k"}, 1 / 3),
        ({"server_schedule": "1/sqrt(k)", "server_lr": 2.0}, 2 * 3**-0.5),
    ],
)
def test_global_learning_rate_by_task(train: dict[str, Any], factor: float) -> None:
    experiment = build_experiment(parse(config({"kind": "special"}, train=TINY["train"] | train)))
    assert server_step_size(experiment.config, experiment.needs, 2) == pytest.approx(factor)


@pytest.mark.parametrize("auto_lambda", [False, True])
def test_first_task_has_no_anchor(auto_lambda: bool) -> None:
    method = Special(lambda_=9.0, auto_lambda=auto_lambda)
    server = opened(method, Server(vector(1.0), state=AnchorState()), 0)
    assert not server.state.anchor.params
    assert float(adjusted(method, server, vector(1.0), task=0).params["w"]) == 1.0


def opened(method: Special, server: Server, task: int) -> Server:
    """The server after the opening exchange of a task, in which no client takes part."""
    opening, _ = method.exchanges(context(task))
    assert opening.participants == "none"
    result: Server = opening.aggregate(server, CollectedUploads(), context(task))
    return result


@settings(max_examples=60, deadline=None)
@given(
    weight=st.floats(0.01, 10),
    steps=st.lists(
        st.tuples(st.lists(st.floats(-5, 5), min_size=3, max_size=3), st.floats(0.1, 1)),
        min_size=1, max_size=12,
    ),
    missing=st.sampled_from(["leave_out", "damp", "carry"]),
)  # fmt: skip
def test_drift_bound(weight: float, steps: list[Any], missing: Any) -> None:
    """||w - anchor|| <= max ||eta_g mean Delta|| / lambda, for all reports, however late."""
    method = Special(lambda_=weight, missing=missing)
    anchor = vector(1.0, -2.0, 0.5)
    server = anchored(anchor, anchor)
    for values, fraction in steps:
        server = after(server, adjusted(method, server, vector(*values), fraction=fraction))
        largest = max(np.linalg.norm(v) for v, _ in steps)
        drift = np.linalg.norm((server.params["w"] - anchor["w"]).numpy())
        assert drift <= largest / weight + 1e-9


def test_missing_clients() -> None:
    server = anchored(vector(0.0), vector(0.0), last_update=vector(4.0))

    def change(missing: Any) -> Change:
        method = Special(lambda_=0.0, missing=missing)
        return adjusted(method, server, vector(1.0), fraction=0.5)

    changes = [change(kind) for kind in ("leave_out", "damp", "carry")]
    assert [float(c.params["w"]) for c in changes] == [1.0, 0.5, 2.5]
    assert [float(c.state.last_update["w"]) for c in changes] == [4.0, 4.0, 2.5]


def test_a_carried_update_ends_with_its_task() -> None:
    server = anchored(vector(1.0), vector(0.0), last_update=vector(4.0), weight=0.3)
    state = opened(Special(missing="carry"), server, 2).state
    assert state == AnchorState(PreviousModel(server.params), weight=0.3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=1, max_size=10))
def test_tuned_drift_stays_within_reach(steps: list[list[float]]) -> None:
    """The tuned weight bounds the drift by reach times the first task's, for any update."""
    method = Special(auto_lambda=True, reach=0.5)
    anchor = vector(1.0, 1.0)
    server = anchored(anchor, anchor, first_distance=4.0)
    for values in steps:
        server = after(server, adjusted(method, server, vector(*values)))
        assert np.linalg.norm((server.params["w"] - anchor["w"]).numpy()) <= 2.0 + 1e-9


def test_tuned_weight_is_drift_over_radius() -> None:
    method = Special(auto_lambda=True, reach=0.5)
    start = opened(method, Server(vector(0.0, 0.0), state=AnchorState()), 0)
    server = opened(method, replace(start, params=vector(3.0, 4.0)), 1)  # distance 5, radius 2.5
    change = adjusted(method, server, vector(0.0, 5.0))
    assert change.state.weight == pytest.approx(2.0)
    torch.testing.assert_close(change.params["w"], vector(0.0, 5 / 3)["w"])


def test_the_radius_is_the_first_tasks_in_all_later_ones() -> None:
    method = Special(auto_lambda=True)
    server = opened(method, Server(vector(0.0, 0.0), state=AnchorState()), 0)
    for task, params in ((1, vector(3.0, 4.0)), (2, vector(30.0, 40.0))):
        server = opened(method, replace(server, params=params), task)
        assert server.state.first_distance == pytest.approx(5.0)


def test_a_first_task_that_moved_nothing_keeps_the_model_at_its_anchor() -> None:
    server = anchored(vector(1.0), vector(1.0), first_distance=0.0)
    assert abs(float(adjusted(Special(auto_lambda=True), server, vector(1.0)).params["w"])) < 1e-9


def test_new_outputs_are_not_anchored() -> None:
    params = {"a": torch.ones(1), "head.0.weight": torch.ones(1), "head.1.weight": torch.ones(1)}
    server = opened(Special(), Server(params, state=AnchorState()), 1)
    assert set(server.state.anchor.params) == {"a", "head.0.weight"}


@pytest.mark.parametrize(
    ("method", "weight", "expected"),
    [
        (Special(), 1.0, 3.0),
        (Special(statistics="blend"), 1.0, 1.5),  # (3 + 0) / 2, with the last round's weight
        (Special(statistics="blend", lambda_=0.5), None, 2.0),  # 3 / 1.5
        (Special(statistics="blend", lambda_=0.5, auto_lambda=True), None, 3.0),
    ],
)
def test_running_statistics_are_averaged_or_blended(
    method: Special, weight: float | None, expected: float
) -> None:
    state = AnchorState(PreviousModel(vector(0.0), vector(0.0)), weight)
    server = Server(vector(0.0), vector(2.0), state)
    change = Change(vector(0.0), vector(1.0), state)
    done = method.adjust(server, change, CollectedUploads(), context(1))
    assert float(done.buffers["w"]) + 2.0 == pytest.approx(expected)


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize("kind", ["special", "special-c"])
@pytest.mark.parametrize("train", [{}, {"server_schedule": "1/k", "weighting": "uniform"}])
def test_lambda_zero_is_fedavg(kind: str, engine: str, train: dict[str, Any]) -> None:
    """Bit for bit, at the defaults and with the paper's settings; clients have unequal data."""
    train = TINY["train"] | train
    plain, same = (
        perdure.run(config(method, engine, train=train)).values["model_sha256"]
        for method in ({"kind": "fedavg"}, {"kind": kind, "lambda": 0})
    )
    assert plain == same


def test_bytes_are_fedavgs() -> None:
    plain, anchored = (
        perdure.run(config({"kind": k})).values["bytes"] for k in ("fedavg", "special")
    )
    assert plain == anchored


def test_drift_of_a_run_keeps_the_bound() -> None:
    drifts: list[dict[str, float]] = []
    perdure.run(
        config({"kind": "special", "lambda": 5.0}),
        watch=lambda state, event: drifts.append(event.get("method", {})),
    )
    seen = [d["drift"] for d in drifts if d]
    assert seen
    assert max(seen) < 1.0


@pytest.mark.parametrize("kind", ["special", "special-c"])
@pytest.mark.parametrize("stream", ["permuted", "split"])
def test_engines_agree(kind: str, stream: str) -> None:
    more = {
        "stream": {"kind": stream, "tasks": 2},
        "model": {"hidden": [12], "head": "growing" if stream == "split" else "shared"},
        "train": TINY["train"] | {"rounds": 1, "max_steps": 3},
    }
    models = []
    for engine in ("serial", "vector"):
        made = build_experiment(parse(config({"kind": kind, "lambda": 0.5}, engine, **more)))
        models.append(run_stream(made, made.initial_state(), lambda *_: None).server.params)
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=0, atol=1e-5, msg=name)


def held(method: SpecialC, anchor: Vector, values: Vector, lr: float) -> Vector:
    """Values after the proximal map that a client of task 1 gets."""
    experiment = plain_experiment()
    server = experiment.initial_state().server
    client: Client = experiment.client(0, context(1), server, {"anchor": anchor})
    _, train = method.exchanges(context(1))
    prepared: Prepared = train.prepare(client)
    (transform,) = prepared.transforms
    assert transform.acts_on_step(sums_gradients=True)
    assert not transform.acts_on_gradient()
    return transform.on_step(values, {}, lr)


def test_proximal_map_of_special_c() -> None:
    rng = np.random.default_rng(1)
    step, anchor = rng.normal(size=4), rng.normal(size=4)
    found = held(SpecialC(lambda_=3.0), vector(*anchor), vector(*step), 0.1)["w"].numpy()
    np.testing.assert_allclose(found, (step + 0.3 * anchor) / 1.3)
    # the map's own definition: stationary point of 1/2||x - step||^2 + lr lambda/2 ||x - anchor||^2
    np.testing.assert_allclose(found - step + 0.3 * (found - anchor), 0, atol=1e-12)


def test_special_c_without_an_anchor_changes_nothing() -> None:
    assert SpecialC(lambda_=3.0).exchanges(context(0)) == [Train()]
    assert held(SpecialC(lambda_=3.0), {}, vector(1.0), 0.1)["w"] == 1.0


def test_special_c_anchors_at_the_model_with_which_a_task_begins() -> None:
    params = {"a": torch.ones(1), "head.0.weight": torch.ones(1), "head.1.weight": torch.ones(1)}
    opening, train = SpecialC().exchanges(context(1))
    server = opening.aggregate(Server(params, state=PreviousModel()), None, context(1))
    sent = train.broadcast(server, context(1))
    assert set(sent) == {"anchor"}
    assert set(sent["anchor"].value) == {"a", "head.0.weight"}


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"kind": "special", "lambda": -1}, "method.lambda: must be at least 0, got -1"),
        ({"kind": "special", "lamda": 1}, "method.lamda: unknown key"),
        ({"kind": "special-c", "lambda": "x"}, "method.lambda: must be a number, got 'x'"),
    ],
)
def test_bad_values_are_named(method: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", "\\(")):
        build(method)


def test_the_drift_of_special_c_is_the_distance_from_its_anchor() -> None:
    params = {"w": torch.tensor([3.0, 0.0]), "new": torch.ones(2)}
    anchor = PreviousModel({"w": torch.tensor([0.0, 4.0])}, {})
    server = Server(params, {}, anchor)
    found = SpecialC().diagnose(server, context(1)).numbers
    assert found["drift"] == pytest.approx(5.0)
    assert SpecialC().diagnose(Server(params, {}, PreviousModel()), context(0)) == Diagnosis()


@pytest.mark.parametrize(("kind", "steps"), [("special", 1), ("special-c", 7)])
def test_the_pull_is_the_way_to_the_anchor_in_a_round(kind: str, steps: int) -> None:
    """Of clients that do not learn, by repeating the map of either method."""
    w, anchor, lr, weight = 3.0, 1.0, 0.2, 0.4
    for _ in range(steps):
        w = (w + weight * anchor) / (1 + weight) if kind == "special" else w
        w = (w + lr * weight * anchor) / (1 + lr * weight) if kind == "special-c" else w
    state: Any = PreviousModel(vector(anchor))
    server = Server(vector(3.0), state=AnchorState(state) if kind == "special" else state)
    where = replace(context(1), lr=lr, local_steps=float(steps))
    found = build({"kind": kind, "lambda": weight}).diagnose(server, where).numbers
    assert found["pull"] == pytest.approx((3.0 - w) / (3.0 - anchor))


@pytest.mark.parametrize(
    ("weight", "warns"), [(0.0, False), (0.01, False), (0.004, False), (0.002, True)]
)
def test_special_c_warns_once_of_an_anchor_that_does_nothing(weight: float, warns: bool) -> None:
    """Three rounds of lr 0.1 and 12 steps: 1% of the way at lambda 0.01 / 3.6 = 0.0028."""
    train = TINY["train"] | {"max_steps": 12, "local_epochs": 12}
    method = {"kind": "special-c", "lambda": weight}
    found = perdure.run(config(method, train=train, stream={"kind": "permuted", "tasks": 3}))
    keys = [(w["key"], w["task"], w["round"]) for w in found.values["warnings"]]
    assert keys == ([("pull", 1, 0)] if warns else [])


def test_the_step_of_a_client_is_the_mean_over_clients_with_data() -> None:
    experiment = plain_experiment()
    sizes = experiment.task(0).partition.sizes
    steps = [-(-int(size) // 16) for size in sizes if size]
    found = experiment.context(experiment.initial_state()).local_steps
    assert found == pytest.approx(np.mean(steps))
