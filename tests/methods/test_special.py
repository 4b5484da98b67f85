"""SPECIAL and SPECIAL-C against their closed forms, computed apart in numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import perdure
from perdure.config import parse
from perdure.errors import UserError
from perdure.federation.experiment import prepare
from perdure.methods import build
from perdure.methods.base import Place, Server
from perdure.methods.special import Special
from perdure.methods.special_c import SpecialC

TINY = {
    "data": {"limit": 240},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 4, "per_round": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [12]},
    "train": {"rounds": 3, "batch_size": 16, "lr": 0.1},
}


def config(method: dict[str, Any], engine: str = "serial", **more: Any) -> dict[str, Any]:
    return {**TINY, **more, "method": method, "engine": {"kind": engine}}


def place(task: int, attendance: float = 1.0) -> Place:
    experiment = prepare(parse(config({"kind": "fedavg"})))
    return replace(experiment.place(experiment.start()), task=task, attendance=attendance)


def vector(*values: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(values, dtype=torch.float64)}


HERE = place(1)


def test_equation_6_by_hand() -> None:
    method = Special(lambda_=0.5, schedule="constant")
    server = Server(vector(2.0, 0.0), memory={"anchor": vector(1.0, 1.0)})
    change, _ = method.adjust(vector(1.0, -1.0), server, HERE)
    # What = (3, -1); (3 + 0.5, -1 + 0.5) / 1.5 = (7/3, -1/3)
    torch.testing.assert_close(change["w"] + server.params["w"], vector(7 / 3, -1 / 3)["w"])


def test_equation_6_minimises_equation_5() -> None:
    rng = np.random.default_rng(0)
    w, step, anchor = (rng.normal(size=5) for _ in range(3))
    method = Special(lambda_=0.3, schedule="constant")
    server = Server(vector(*w), memory={"anchor": vector(*anchor)})
    change, _ = method.adjust(vector(*step), server, HERE)
    found = w + change["w"].numpy()

    def objective(x: np.ndarray) -> float:
        return float(0.5 * ((x - w - step) ** 2).sum() + 0.15 * ((x - anchor) ** 2).sum())

    best = objective(found)
    assert all(objective(found + 1e-3 * rng.normal(size=5)) > best for _ in range(50))


@pytest.mark.parametrize(
    ("schedule", "factor"), [("1/k", 1 / 3), ("1/sqrt(k)", 3**-0.5), ("constant", 1)]
)
def test_global_learning_rate_by_task(schedule: Any, factor: float) -> None:
    method = Special(lambda_=0.0, schedule=schedule, global_lr=2.0)
    server = Server(vector(0.0), memory={"anchor": vector(5.0)})
    change, _ = method.adjust(vector(1.0), server, place(2))
    assert float(change["w"]) == pytest.approx(2 * factor)


def test_first_task_has_no_anchor() -> None:
    method = Special(lambda_=9.0)
    server = method.begin_task(Server(vector(1.0)), place(0))
    assert float(method.adjust(vector(1.0), server, place(0))[0]["w"]) == 1.0


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
    """||w - anchor|| <= eta_g max ||mean Delta|| / lambda, whoever reported and however late."""
    method = Special(lambda_=weight, missing=missing)
    anchor = vector(1.0, -2.0, 0.5)
    server, eta = Server(anchor, memory={"anchor": anchor}), 0.5
    for values, share in steps:
        change, memory = method.adjust(vector(*values), server, replace(HERE, attendance=share))
        server = Server({"w": server.params["w"] + change["w"]}, memory=memory)
        largest = max(np.linalg.norm(v) for v, _ in steps)
        drift = np.linalg.norm((server.params["w"] - anchor["w"]).numpy())
        assert drift <= eta * largest / weight + 1e-9


def test_missing_clients() -> None:
    anchor, half = vector(0.0), replace(HERE, attendance=0.5)
    server = Server(anchor, memory={"anchor": anchor, "last": vector(4.0)})

    def moved(missing: Any) -> float:
        method = Special(lambda_=0.0, schedule="constant", missing=missing)
        return float(method.adjust(vector(1.0), server, half)[0]["w"])

    assert [moved(kind) for kind in ("leave_out", "damp", "carry")] == [1.0, 0.5, 2.5]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=1, max_size=10))
def test_tuned_drift_stays_within_reach(steps: list[list[float]]) -> None:
    """The tuned weight bounds the drift by reach times the first task's way, for any update."""
    method = Special(tune=True, reach=0.5)
    anchor = vector(1.0, 1.0)
    server = Server(anchor, memory={"anchor": anchor, "way": 4.0})
    for values in steps:
        change, memory = method.adjust(vector(*values), server, HERE)
        server = Server({"w": server.params["w"] + change["w"]}, memory=memory)
        assert np.linalg.norm((server.params["w"] - anchor["w"]).numpy()) <= 2.0 + 1e-9


def test_tuned_weight_is_drift_over_radius() -> None:
    method = Special(tune=True, reach=0.5, schedule="constant")
    start = Server(vector(3.0, 4.0), memory=method.start(vector(0.0, 0.0), place(0)))
    server = method.begin_task(start, HERE)  # way 5, radius 2.5
    change, memory = method.adjust(vector(0.0, 5.0), server, HERE)
    assert memory["lambda"] == pytest.approx(2.0)
    torch.testing.assert_close(change["w"], vector(0.0, 5 / 3)["w"])


def test_a_first_task_that_moved_nothing_keeps_the_model_at_its_anchor() -> None:
    method = Special(tune=True)
    server = Server(vector(1.0), memory={"anchor": vector(1.0), "way": 0.0})
    change, _ = method.adjust(vector(1.0), server, HERE)
    assert abs(float(change["w"])) < 1e-9


def test_new_outputs_are_not_anchored() -> None:
    params = {"a": torch.ones(1), "head.0.weight": torch.ones(1), "head.1.weight": torch.ones(1)}
    server = Special().begin_task(Server(params), HERE)
    assert set(server.memory["anchor"]) == {"a", "head.0.weight"}


def test_running_statistics_are_averaged_or_blended() -> None:
    memory = {"anchor_buffers": vector(0.0), "lambda": 1.0}
    server = Server({}, vector(2.0), memory)
    assert float(Special().adjust_buffers(vector(1.0), Server({}, vector(2.0)), HERE)["w"]) == 1.0
    blended = Special(statistics="blend").adjust_buffers(vector(1.0), server, HERE)["w"]
    assert float(blended) + 2.0 == pytest.approx(1.5)  # (3 + 0) / 2


def test_lambda_zero_with_a_constant_rate_is_fedavg() -> None:
    plain = perdure.run(config({"kind": "fedavg"}, train=TINY["train"] | {"weighting": "uniform"}))
    same = perdure.run(config({"kind": "special", "lambda": 0, "schedule": "constant"}))
    assert plain.values["model_sha256"] == same.values["model_sha256"]


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
    model = {"hidden": [12], "head": "growing" if stream == "split" else "shared"}
    method = {"kind": kind, "lambda": 0.5}
    runs = [
        perdure.run(config(method, engine, stream={"kind": stream, "tasks": 2}, model=model))
        for engine in ("serial", "vector")
    ]
    one, two = (np.array(r.values["matrix"]["task_agnostic"][-1], dtype=float) for r in runs)
    np.testing.assert_allclose(one, two, atol=0.01)


def test_proximal_map_of_special_c() -> None:
    rng = np.random.default_rng(1)
    step, anchor = rng.normal(size=4), rng.normal(size=4)
    received = {"anchor": vector(*anchor)}
    found = SpecialC(lambda_=3.0).settle(vector(*step), {}, received, {}, 0.1)["w"].numpy()
    np.testing.assert_allclose(found, (step + 0.3 * anchor) / 1.3)
    # the map's own definition: stationary point of 1/2||x - step||^2 + lr lambda/2 ||x - anchor||^2
    np.testing.assert_allclose(found - step + 0.3 * (found - anchor), 0, atol=1e-12)


def test_special_c_without_an_anchor_changes_nothing() -> None:
    assert SpecialC(lambda_=3.0).settle(vector(1.0), {}, {}, {}, 0.1)["w"] == 1.0


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"kind": "special", "lambda": -1}, "method.lambda: got -1, allowed: at least 0"),
        ({"kind": "special", "schedule": "2/k"}, "method.schedule: got '2/k'"),
        ({"kind": "special", "lamda": 1}, "method.lamda: unknown key"),
        ({"kind": "special-c", "lambda": "x"}, "method.lambda: got 'x', allowed: a number"),
    ],
)
def test_bad_values_are_named(method: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", "\\(")):
        build(method)
