"""Methods combined by config: each part still does its work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from subspace_runs import experiment_of, second_task

import perdure
from perdure.algebra.alignment import align_models
from perdure.config import parse
from perdure.contract import (
    Change,
    ClientResult,
    CollectedUploads,
    Context,
    Each,
    Exchange,
    LocalUpdate,
    Method,
    Prepared,
    Rows,
    Scalar,
    Server,
    Sum,
    Train,
    Transform,
    stacked,
)
from perdure.contract.exchanges import split_exchanges
from perdure.core.errors import UserError
from perdure.core.trees import Tensors
from perdure.methods.combine import Combined
from perdure.methods.fedomg import FedOmg
from perdure.methods.registry import build
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream
from perdure.training.round import train_round

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


def run(method: dict[str, Any], engine: str = "serial", **changes: Any) -> perdure.Result:
    return perdure.run({**SMALL, "method": method, "engine": {"kind": engine}, **changes})


def weights(method: dict[str, Any], engine: str) -> Tensors:
    """The model after two tasks of one round of two steps."""
    train = {"rounds": 1, "max_steps": 2, "batch_size": 16, "lr": 0.05}
    values = {**SMALL, "method": method, "engine": {"kind": engine}, "train": train}
    experiment = build_experiment(parse(values))
    return run_stream(
        experiment, experiment.initial_state(), lambda state, event: None
    ).server.params


def test_a_method_with_nothing_to_add_changes_nothing() -> None:
    one, two = run({"kind": "fedprox"}), run({"kind": "fedprox", "with": [{"kind": "fedavg"}]})
    assert one.values["model_sha256"] == two.values["model_sha256"]
    assert one.values["bytes"] == two.values["bytes"]


@pytest.mark.parametrize(
    "kinds",
    [
        ("er", "lwf"),
        ("stamp", "lwf"),
        ("er", "stamp"),
        ("flwf-2t", "er"),
        ("fedprotip", "special"),
        ("fot", "special"),
        ("stamp", "special"),
        ("er", "special"),
        ("ewc", "lwf"),
        ("fedprox", "fot"),
        ("gpm", "scaffold"),
        ("fedprotip", "er", "special-c"),
    ],
)
def test_engines_agree_on_combinations(kinds: tuple[str, ...]) -> None:
    first, *others = kinds
    method = {"kind": first, "with": [{"kind": kind} for kind in others]}
    serial, vector = (weights(method, engine) for engine in ("serial", "vector"))
    for name, value in serial.items():
        torch.testing.assert_close(vector[name], value, rtol=0, atol=1e-5)
    for kind in kinds:  # each part does something
        rest = [{"kind": other} for other in kinds if other != kind]
        less = weights({**rest[0], "with": rest[1:]}, "serial")
        assert any(not torch.allclose(serial[name], less[name], atol=1e-6) for name in serial)


def test_engines_agree_on_many_parts() -> None:
    serial, vector = (weights(ALL, engine) for engine in ("serial", "vector"))
    for name, value in serial.items():
        torch.testing.assert_close(vector[name], value, rtol=0, atol=1e-5)


def test_a_killed_run_of_a_combination_resumes_with_the_same_result(tmp_path: Any) -> None:
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
        ({"kind": "er", "with": [{"kind": "er"}]}, "got 'er' twice"),
        (
            {"kind": "er", "with": "lwf"},
            "method.with: must be a list of methods, each with its kind, got 'lwf'",
        ),
        ({"kind": "er", "with": [{"lambda": 1}]}, "must be a list of methods"),
        ({"kind": "er", "with": [{"kind": "nothing"}]}, "method.with.0.kind: .*, got 'nothing'"),
        (
            {"kind": "er", "with": [{"kind": "special", "lambda": -1}]},
            "method.with.0.lambda: must be at least 0, got -1",
        ),
        (
            {"kind": "fot", "with": [{"kind": "fed-dualp"}]},
            "do not need trained layers, .*, got 'fot'",
        ),
        (
            {"kind": "pip", "with": [{"kind": "fed-l2p"}]},
            "its own predict_features, got 'pip' and 'fed-l2p'",
        ),
    ],
)
def test_methods_that_cannot_be_combined_are_named(method: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(method)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("stamp", "fedomg"), "one at most has its own combine, got 'stamp' and 'fedomg'"),
        (("fedadam", "fednova"), "one at most has its own combine, got 'fedadam' and 'fednova'"),
    ],
)
def test_two_owners_of_one_function_are_refused_before_training(kinds: Any, words: str) -> None:
    method = {"kind": kinds[0], "with": [{"kind": kinds[1]}]}
    with pytest.raises(UserError, match=words):
        experiment_of(method).initial_state()


# ---- how parts are put together


@dataclass(frozen=True)
class Calls:
    """A server state."""

    calls: int = 0


@dataclass(frozen=True)
class Affine(Transform):
    """Multiplies and adds."""

    factor: float
    more: float

    def on_gradient(self, grads: Any, params: Any) -> Any:
        return {name: g * self.factor + self.more for name, g in grads.items()}


@dataclass(frozen=True)
class Times(Method):
    """Multiplies and adds, so that the order of a chain can be seen."""

    factor: float = 1.0
    more: float = 0.0
    ServerState: ClassVar[type] = Calls

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        opening = Exchange("open", "none", aggregate=self.count)
        ending = Exchange("end", "none", aggregate=self.count)
        train = Train(prepare=self.local, adjust=self.adjust, penalty=self.penalty)
        return [opening, train, ending]

    def count(self, server: Any, uploads: Any, context: Any) -> Any:
        return replace(server, state=Calls(server.state.calls + 1))

    def local(self, client: Any) -> Prepared:
        return Prepared(transforms=(Affine(self.factor, self.more),))

    def penalty(self, step: Any) -> Scalar:
        return Scalar(torch.tensor(self.more))

    def adjust(self, server: Any, change: Change, uploads: Any, context: Any) -> Change:
        params = {name: v * self.factor + self.more for name, v in change.params.items()}
        return replace(change, params=params, state=Calls(change.state.calls + 1))


def context_of(method: Method) -> tuple[Any, Any]:
    experiment = replace(experiment_of({"kind": "fedavg"}), method=method)
    state = experiment.initial_state()
    return experiment.context(state), state


def test_order_of_the_chains() -> None:
    both = Combined(parts=(("double", Times(2.0)), ("one", Times(1.0, 1.0))))
    context, state = context_of(both)
    opening, train, ending = split_exchanges(both.exchanges(context))
    assert [e.name for e in (*opening, *ending)] == [
        "double.open", "one.open", "double.end", "one.end",
    ]  # fmt: skip
    experiment = replace(experiment_of({"kind": "fedavg"}), method=both)
    client = experiment.client(0, context, state.server, {"params": state.server.params})
    assert train.prepare is not None
    grads = {"w": torch.tensor(3.0)}
    for transform in train.prepare(client).transforms:
        grads = transform.on_gradient(grads, {})
    assert grads["w"] == 8.0  # (3 + 1) * 2: the first one named has the last word
    change = Change({"w": torch.tensor(3.0)}, {}, both.ServerState())
    assert train.adjust is not None
    after = train.adjust(Server({}, {}, both.ServerState()), change, CollectedUploads(), context)
    assert after.params["w"] == 7.0  # 3 * 2 + 1
    assert (after.state.double, after.state.one) == (Calls(1), Calls(1))


def test_each_part_sees_its_own_state_and_fields() -> None:
    result = experiment_of({"kind": "fedavg"})
    both = Combined(parts=(("a-b", Times(1.0)), ("c", Method())))
    experiment = replace(result, method=both)
    state = run_stream(experiment, experiment.initial_state(), lambda state, event: None)
    rounds, tasks = 2, 3
    assert state.server.state.a_b == Calls(tasks * (rounds + 2))


@dataclass(frozen=True)
class Noted:
    """A client state."""

    times: int = 0


@dataclass(frozen=True)
class Doubled(Method):
    """Sends twice its update and a further field."""

    ClientState: ClassVar[type] = Noted

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(make_upload=self.upload)]

    def upload(self, client: Any, local: LocalUpdate) -> ClientResult:
        twice = {name: 2 * value for name, value in local.update.items()}
        note = Sum({"n": torch.ones(1)})
        state = Noted(client.state.times + 1)
        return ClientResult({"update": Sum(twice, 1.0), "note": note}, state)


@dataclass(frozen=True)
class Halved(Method):
    """Sends half of its update, as a stack."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(make_upload=self.upload)]

    @stacked
    def upload(self, clients: list[Any], local: LocalUpdate) -> ClientResult:
        half = {name: value / 2 for name, value in local.update.items()}
        return ClientResult({"update": Sum(half)})


@pytest.mark.parametrize("first", [0, 1])
def test_an_each_stays_an_each_in_any_order(first: int) -> None:
    parts = [("a", Doubled()), ("b", FedOmg())]
    both = Combined(parts=tuple(parts[first:] + parts[:first]))
    context, state = context_of(both)
    train = split_exchanges(both.exchanges(context)).train
    assert train.per_client_updates
    experiment = replace(experiment_of({"kind": "fedavg"}), method=both)
    client = experiment.client(0, context, state.server, {"params": state.server.params})
    update = {name: torch.ones_like(value) for name, value in client.params.items()}
    assert train.make_upload is not None
    done = train.make_upload(client, LocalUpdate(update, {}))
    assert isinstance(done.fields["update"], Each)
    assert float(done.fields["update"].value["head.bias"][0]) == 2.0
    assert set(done.fields) == {"update", "a.note"}
    assert done.state.a == Noted(1)


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_uploads_are_chained_with_the_weight_that_was_set(engine: str) -> None:
    """Doubled and halved is what FedAvg sends, with a weight of one per client."""
    both = Combined(parts=(("d", Doubled()), ("h", Halved())))
    values = {**SMALL, "engine": {"kind": engine}}
    made = [
        replace(
            build_experiment(parse({**values, "train": {**SMALL["train"], "weighting": w}})),
            method=m,
        )
        for w, m in (("samples", both), ("uniform", Method()))
    ]
    one, two = (run_stream(x, x.initial_state(), lambda s, e: None).server.params for x in made)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name])
    assert made[0].client_state(0)[0].d.times > 0


@dataclass(frozen=True)
class Extra(Method):
    """Adds rows of one value, whose place its penalty looks at."""

    count: int = 2
    value: float = 1.0
    seen: ClassVar[dict[float, list[Any]]] = {}

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(extra_rows=self.rows, penalty=self.look)]

    def rows(self, step: Any) -> Rows:
        x = torch.full((self.count, *step.batch.x.shape[1:]), self.value)
        return Rows(x, torch.zeros(self.count, dtype=torch.int64), torch.ones(self.count))

    def look(self, step: Any) -> Scalar:
        self.seen.setdefault(self.value, []).append((step.batch.x[step.extra], step.batch.extra))
        return Scalar(step.logits().sum() * 0)


def test_extra_rows_are_concatenated_and_each_part_knows_its_own() -> None:
    Extra.seen.clear()
    both = Combined(parts=(("one", Extra(2, 1.0)), ("two", Extra(3, 2.0))))
    experiment = replace(experiment_of({"kind": "fedavg"}), method=both)
    state = experiment.initial_state()
    from perdure.training.loop import begin_task

    begin_task(experiment, state)
    train_round(experiment, state)
    for value, count in ((1.0, 2), (2.0, 3)):
        rows, extra = Extra.seen[value][0]
        assert extra == 5
        assert rows.shape[0] == count
        assert bool((rows == value).all())


def test_a_part_sees_its_own_uploads_and_the_common_ones() -> None:
    seen: list[CollectedUploads] = []

    @dataclass(frozen=True)
    class Looking(Method):
        def exchanges(self, context: Context) -> list[Exchange | Train]:
            return [Train(combine=self.combine)]

        def combine(self, server: Any, uploads: CollectedUploads, context: Any) -> Any:
            seen.append(uploads)
            return uploads.mean("update")

    both = Combined(parts=(("a", Looking()), ("b", Method())))
    context, _ = context_of(both)
    train = split_exchanges(both.exchanges(context)).train
    uploads = CollectedUploads(
        {"update": {"w": torch.ones(1)}, "a.x": {}, "b.x": {}},
        {"update": 1.0, "a.x": 1.0, "b.x": 1.0}, {}, {0: 1.0}, 0.5, {0: 3},
    )  # fmt: skip
    assert train.combine is not None
    train.combine(Server({}, {}, both.ServerState()), uploads, context)
    assert set(seen[0].sums) == {"update", "x"}
    assert (seen[0].upload_fraction, seen[0].staleness) == (0.5, {0: 3})


# ---- local projection with a server anchor and with server alignment

PROJECTED = {"kind": "fedprotip", "threshold": 0.9}
ANCHOR = {"kind": "special", "lambda": 0.5}
ALIGNED = {"kind": "fedomg"}


def inside(change: dict[str, torch.Tensor], spaces: dict[str, Any]) -> float:
    """The largest fraction of a change that lies in its layer's protected subspace."""
    fractions = []
    for name, space in spaces.items():
        d = change[name].flatten(1).double()
        if "basis" in space:
            part = d @ space["basis"].double()
        else:
            free = space["free"].double()
            part = d - d @ free @ free.T
        fractions.append(float(part.norm() / d.norm()))
    return max(fractions)


@dataclass(frozen=True)
class Spy(Method):
    """Notes the change as it is at its place in the chain, and the uploads."""

    seen: ClassVar[list[Any]] = []

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(adjust=self.note)]

    def note(self, server: Any, change: Change, uploads: Any, context: Any) -> Change:
        self.seen.append((change.params, uploads))
        return change


def spied(method: dict[str, Any]) -> tuple[Any, Any, type[Spy]]:
    """A combination at its second task, with a spy before its second part."""
    first, *others = method["with"]
    spying = {**method, "with": [{"kind": f"{__name__}.Spy"}, first, *others]}
    experiment, state = second_task(spying, stream={"tasks": 2})
    Spy.seen.clear()
    return experiment, state, Spy


def test_projection_with_anchor() -> None:
    made, state, spy = spied(PROJECTED | {"with": [ANCHOR]})
    spaces = state.server.state.fedprotip.spaces
    anchor = state.server.state.special.anchor.params
    for _ in range(2):
        start = state.server.params
        train_round(made, state)
        step = spy.seen[-1][0]
        assert inside(step, spaces) < 1e-4  # the projection's work, before the anchor's
        for name, value in step.items():  # the anchor's: eq. 6
            expected = (start[name] + value + 0.5 * anchor[name]) / 1.5
            torch.testing.assert_close(state.server.params[name], expected)
    largest = max(_length(step) for step, _ in spy.seen)
    drift = _length({n: state.server.params[n] - anchor[n] for n in spy.seen[0][0]})
    assert 0 < drift <= largest / 0.5


def _length(values: dict[str, torch.Tensor]) -> float:
    return float(torch.cat([v.flatten() for v in values.values()]).norm())


@pytest.mark.parametrize("aligned", [ALIGNED, {"kind": "stamp"}])
def test_projection_with_alignment(aligned: dict[str, Any]) -> None:
    made, state, spy = spied(PROJECTED | {"with": [ANCHOR, aligned]})
    part = dict(made.method.parts)[aligned["kind"]]
    spaces = state.server.state.fedprotip.spaces
    train_round(made, state)
    step, uploads = spy.seen[0]
    updates = list(uploads.per_client["update"].values())
    expected, mean = align_models(updates, part.alignment), uploads.mean("update")
    outside = [name for name in step if name not in spaces]
    for name in outside:  # what no projection touched is the aligned update
        torch.testing.assert_close(step[name], expected[name])
    assert any(not torch.allclose(expected[name], mean[name]) for name in expected)
    assert inside(step, spaces) < 1e-4
    assert state.server.state.special.weight == 0.5


def test_combined_bytes_are_the_projections() -> None:
    plain, more = (
        run(m).values["bytes"] for m in (PROJECTED, PROJECTED | {"with": [ANCHOR, ALIGNED]})
    )
    assert plain["up"] == pytest.approx(more["up"], rel=0.01)
    assert plain["down"] == pytest.approx(more["down"], rel=0.01)
