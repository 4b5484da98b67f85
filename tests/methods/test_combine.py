"""Methods combined by config: each part still does its work."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from subspace_runs import experiment_of, next_task, train_task

import perdure
from perdure.algebra.alignment import align_models
from perdure.errors import UserError
from perdure.federation.loop import begin_task, train_round
from perdure.federation.messages import Each, Report, Sum
from perdure.methods import build
from perdure.methods.base import Method, Place, Server
from perdure.methods.combine import Combined
from perdure.methods.fedomg import FedOmg
from perdure.methods.special import Special

SMALL = {
    "data": {"limit": 160},
    "stream": {"tasks": 2},
    "clients": {"count": 4, "per_round": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [10]},
    "train": {"rounds": 2, "batch_size": 16, "lr": 0.05},
}
ALL = {
    "kind": "fedprox",
    "mu": 0.1,
    "with": [{"kind": "special", "lambda": 0.2}, {"kind": "ewc", "samples": 20}, {"kind": "er"}],
}


def run(method: dict[str, Any], engine: str = "serial") -> perdure.Result:
    return perdure.run({**SMALL, "method": method, "engine": {"kind": engine}})


def test_every_hook_of_the_contract_is_combined() -> None:
    hooks = {name for name, f in inspect.getmembers(Method, inspect.isfunction) if name[0] != "_"}
    alone = {"aggregate", "finish_all"}  # the chain itself, and a shortcut that it does not take
    missing = {name for name in hooks - alone if getattr(Combined, name) is getattr(Method, name)}
    assert not missing


def test_a_method_with_nothing_to_add_changes_nothing() -> None:
    one, two = run({"kind": "fedprox"}), run({"kind": "fedprox", "with": [{"kind": "fedavg"}]})
    assert one.values["model_sha256"] == two.values["model_sha256"]
    assert one.values["bytes"] == two.values["bytes"]


def test_engines_agree_on_many_parts() -> None:
    one, two = (
        run(ALL, engine).values["matrix"]["task_agnostic"] for engine in ("serial", "vector")
    )
    np.testing.assert_allclose(one[-1], two[-1], atol=0.02)


def test_a_killed_run_of_many_parts_goes_on_where_it_was(tmp_path: Any) -> None:
    whole = run(ALL)

    class Stop(Exception):
        pass

    def stop(state: Any, event: Any) -> None:
        if state.task == 1 and state.round == 1:
            raise Stop

    values = {**SMALL, "method": ALL, "engine": {"kind": "serial"}}
    with pytest.raises(Stop):
        perdure.run(values, out=tmp_path / "run", watch=stop)
    assert perdure.resume(tmp_path / "run").values["model_sha256"] == whole.values["model_sha256"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"kind": "er", "with": [{"kind": "lwf"}]}, "'er' and 'lwf' each have their own loss"),
        ({"kind": "er", "with": [{"kind": "er"}]}, "got 'er' twice"),
        ({"kind": "er", "with": "lwf"}, "method.with: got 'lwf', allowed: a list of methods"),
        ({"kind": "er", "with": [{"lambda": 1}]}, "allowed: a list of methods"),
        ({"kind": "er", "with": [{"kind": "nothing"}]}, r"method.with.0.kind: got 'nothing'"),
        (
            {"kind": "er", "with": [{"kind": "special", "lambda": -1}]},
            "method.with.0.lambda: got -1",
        ),
        ({"kind": "er", "with": [{"kind": "fedomg", "diagnostics": True}]}, "'fedomg' aggregates"),
    ],
)
def test_what_does_not_go_together_is_named(method: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(method)


@dataclass(frozen=True)
class Times(Method):
    """Multiplies and adds, so that the order of a chain can be seen."""

    factor: float = 1.0
    more: float = 0.0

    def _change(self, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value * self.factor + self.more for name, value in values.items()}

    def gradient(self, grads: Any, params: Any, received: Any, own: Any) -> Any:
        return self._change(grads)

    def adjust(self, update: Any, server: Server, place: Place) -> Any:
        return self._change(update), {"calls": server.memory.get("calls", 0) + 1}

    def penalty(self, net: Any, params: Any, batch: Any, received: Any, own: Any) -> Any:
        return torch.tensor(self.more)


def test_order_of_the_chains() -> None:
    both = Combined((("double", Times(2.0)), ("one", Times(1.0, 1.0))))
    received = {"params": {}}
    assert both.gradient({"w": torch.tensor(3.0)}, {}, received, {})["w"] == 8.0  # (3 + 1) * 2
    place: Any = None
    update, memory = both.adjust({"w": torch.tensor(3.0)}, Server({}), place)
    assert update["w"] == 7.0  # 3 * 2 + 1
    assert memory == {"double": {"calls": 1}, "one": {"calls": 1}}
    assert both.penalty(None, {}, None, received, {}) == 1.0  # type: ignore[arg-type]


@dataclass(frozen=True)
class Doubled(Method):
    """Sends twice its update and says so in a field of its own."""

    def finish(self, client: Any, update: Any, buffers: Any) -> Any:
        from perdure.methods.base import Finish

        twice = {name: 2 * value for name, value in update.items()}
        return Finish({"update": Sum(twice, 1.0), "note": Sum({"n": torch.ones(1)})}, {"times": 2})


def test_an_each_stays_an_each_whatever_the_order() -> None:
    made = experiment_of({"kind": "fedavg"})
    state = made.start()
    client = made.client(0, made.place(state), state.server, {"params": state.server.params})
    update = {name: torch.ones_like(value) for name, value in client.params.items()}
    for parts in ((("a", Doubled()), ("b", FedOmg())), (("b", FedOmg()), ("a", Doubled()))):
        done = Combined(parts).finish(client, update, {})
        assert isinstance(done.upload["update"], Each)
        assert float(done.upload["update"].value["head.bias"][0]) == 2.0
        assert set(done.upload) == {"update", "a.note"}
        assert done.kept == {"a": {"times": 2}}


def test_a_part_sees_its_own_fields_and_the_shared_ones() -> None:
    seen: list[Report] = []

    @dataclass(frozen=True)
    class Looking(Method):
        def combine(self, report: Report, server: Server, place: Place) -> Any:
            seen.append(report)
            return report.mean("update")

    report = Report(
        {"update": {"w": torch.ones(1)}, "a.x": {}, "b.x": {}},
        {"update": 1.0, "a.x": 1.0, "b.x": 1.0}, {}, {0: 1.0},
    )  # fmt: skip
    both, place = Combined((("a", Looking()), ("b", Method()))), None
    both.combine(report, Server({}, memory={"a": {}, "b": {}}), place)  # type: ignore[arg-type]
    assert set(seen[0].totals) == {"update", "x"}


# ---- local projection with a server anchor and with server alignment

PROJECTED = {"kind": "fedprotip", "threshold": 0.9}
ANCHOR = {"kind": "special", "lambda": 0.5, "schedule": "constant"}
ALIGNED = {"kind": "fedomg"}


def second_task(method: dict[str, Any]) -> tuple[Any, Any]:
    made = experiment_of(method, stream={"tasks": 2})
    state = made.start()
    train_task(made, state)
    next_task(state)
    begin_task(made, state)
    return made, state


def inside(change: dict[str, torch.Tensor], spaces: dict[str, Any]) -> float:
    """The largest share of a change that lies in its layer's protected space."""
    shares = []
    for name, space in spaces.items():
        d = change[name].flatten(1).double()
        if "basis" in space:
            part = d @ space["basis"].double()
        else:
            free = space["free"].double()
            part = d - d @ free @ free.T
        shares.append(float(part.norm() / d.norm()))
    return max(shares)


def before_the_anchor(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """What reaches the anchor, round after round."""
    seen: list[dict[str, torch.Tensor]] = []
    adjust = Special.adjust

    def spy(self: Special, update: Any, server: Server, place: Place) -> Any:
        seen.append(update)
        return adjust(self, update, server, place)

    monkeypatch.setattr(Special, "adjust", spy)
    return seen


def test_projection_with_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    made, state = second_task(PROJECTED | {"with": [ANCHOR]})
    spaces = state.server.memory["fedprotip"]["spaces"]
    anchor = state.server.memory["special"]["anchor"]
    before = before_the_anchor(monkeypatch)
    for _ in range(2):
        start = state.server.params
        train_round(made, state)
        step = before[-1]
        assert inside(step, spaces) < 1e-4  # the projection's work, before the anchor's
        for name, value in step.items():  # the anchor's: eq. 6
            expected = (start[name] + value + 0.5 * anchor[name]) / 1.5
            torch.testing.assert_close(state.server.params[name], expected)
    largest = max(_length(step) for step in before)
    drift = _length({n: state.server.params[n] - anchor[n] for n in before[0]})
    assert 0 < drift <= largest / 0.5


def _length(values: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([v.flatten() for v in values.values()]).norm())


@pytest.mark.parametrize("aligned", [ALIGNED, {"kind": "stamp"}])
def test_projection_with_alignment(
    aligned: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = PROJECTED | {"with": [ANCHOR, aligned]}
    made, state = second_task(method)
    part = dict(made.method.parts)[aligned["kind"]]
    spaces = state.server.memory["fedprotip"]["spaces"]
    seen: list[tuple[Report, dict[str, torch.Tensor]]] = []
    combine = type(part).combine

    def spy(self: Any, report: Report, server: Server, place: Place) -> Any:
        found = combine(self, report, server, place)
        seen.append((report, found))
        return found

    monkeypatch.setattr(type(part), "combine", spy)
    before = before_the_anchor(monkeypatch)
    train_round(made, state)
    report, found = seen[0]
    updates = list(report.each["update"].values())
    expected = align_models(updates, part.alignment)
    mean = report.mean("update")
    for name, value in found.items():
        torch.testing.assert_close(value, part.global_lr * expected[name])
    assert any(not torch.allclose(found[name], mean[name]) for name in found)
    assert inside(before[0], spaces) < 1e-4
    assert state.server.memory["special"]["lambda"] == 0.5


def test_combined_bytes_are_the_projections() -> None:
    sent = {"stream": {"tasks": 2}}
    plain, more = (
        perdure.run({**SMALL, **sent, "method": m, "engine": {"kind": "serial"}}).values["bytes"]
        for m in (PROJECTED, PROJECTED | {"with": [ANCHOR, ALIGNED]})
    )
    assert plain["up"] == pytest.approx(more["up"], rel=0.01)
    assert plain["down"] == pytest.approx(more["down"], rel=0.01)
