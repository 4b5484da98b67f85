"""What a user's method could get wrong is refused with a sentence, the same on both engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

from perdure.config import parse
from perdure.contract import (
    AddToGradient,
    Change,
    ClientResult,
    ContractError,
    Each,
    Exchange,
    Method,
    Nothing,
    OncePerTask,
    Prepared,
    ProjectOut,
    Proximal,
    Rows,
    Scalar,
    Sum,
    Train,
    stacked,
)
from perdure.core.errors import UserError
from perdure.core.states import from_tree
from perdure.methods.registry import build
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "data": {"limit": 60, "test_limit": 30},
    "stream": {"tasks": 2},
    "clients": {"count": 3},
    "model": {"hidden": [6]},
    "train": {"rounds": 1, "batch_size": 8, "lr": 0.1},
}


@dataclass(frozen=True)
class Wrong(Method):
    """Declares what a test asks for."""

    declared: ClassVar[Callable[[Any], list[Any]]] = lambda context: [Train()]

    def exchanges(self, context: Any) -> list[Any]:
        return type(self).declared(context)


def run(declared: Callable[[Any], list[Any]], engine: str, **changes: Any) -> RunState:
    kind = type("Mistaken", (Wrong,), {"declared": staticmethod(declared)})
    config = parse({**VALUES, "engine": {"kind": engine}, **changes})
    experiment: Experiment = replace(build_experiment(config), method=kind())
    return run_stream(experiment, experiment.initial_state(), lambda state, event: None)


def message_of(declared: Callable[[Any], list[Any]], error: type[Exception] = ContractError) -> str:
    """The sentence, which is the same on both engines."""
    sentences = []
    for engine in ("serial", "vector"):
        with pytest.raises(error) as caught:
            run(declared, engine)
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]
    return sentences[0]


def trains(**functions: Any) -> Callable[[Any], list[Any]]:
    train = Train(**functions)
    return lambda context: [train]


HEAD = torch.zeros(10, 6)


def added(values: dict[str, torch.Tensor]) -> Callable[[Any], Prepared]:
    return lambda client: Prepared(transforms=(AddToGradient(values),))


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        pytest.param(
            trains(loss=lambda step: F.cross_entropy(step.logits(), step.batch.y)),
            "or Scalar(value) if it is no mean over rows, got a single value",
            id="scalar loss",
        ),
        pytest.param(
            trains(loss=lambda step: step.logits()),
            "loss: must be one value per row ([8]), got shape [8, 10]",
            id="matrix loss",
        ),
        pytest.param(
            trains(loss=lambda step: 0.5),
            "loss: must be a tensor with one value per row ([8]), got a float",
            id="float loss",
        ),
        pytest.param(
            trains(penalty=lambda step: sum(p.square().sum() for p in step.params.values())),
            "penalty: must be one value per row ([8]), which the engine averages",
            id="scalar penalty",
        ),
        pytest.param(
            trains(penalty=lambda step: Scalar(step.logits())),
            "penalty: must be a Scalar of one value, got a Scalar of shape [8, 10]",
            id="matrix in a Scalar",
        ),
        pytest.param(
            trains(combine=lambda s, u, c: {n: v.mean(0) for n, v in u.mean("update").items()}),
            "combine: 'fc1.weight': must be of shape [6, 64], got shape [64]",
            id="combine with a wrong shape",
        ),
        pytest.param(
            trains(adjust=lambda s, ch, u, c: replace(ch, params={"hed.weight": HEAD})),
            "head.bias, got 'hed.weight' (did you mean 'head.weight'?)",
            id="adjust with an unknown name",
        ),
        pytest.param(
            trains(adjust=lambda s, ch, u, c: replace(ch, buffers={"bn.running_mean": HEAD})),
            "adjust: must be left out (there are no names to choose from), got 'bn.running_mean'",
            id="adjust with unknown statistics",
        ),
        pytest.param(
            trains(adjust=lambda s, ch, u, c: ch.params),
            "adjust: must be a Change, got a dict",
            id="adjust that returns no Change",
        ),
        pytest.param(
            trains(adjust=lambda s, ch, u, c: replace(ch, params=u.mean("updat"))),
            "uploads.mean: must be update, got 'updat' (did you mean 'update'?)",
            id="field with a typo",
        ),
        pytest.param(
            trains(prepare=added({"head.0.weight": HEAD})),
            "transform AddToGradient: must be one of fc1.weight, fc1.bias, head.weight, "
            "head.bias, got 'head.0.weight'",
            id="transform of an unknown parameter",
        ),
        pytest.param(
            trains(prepare=added({"head.weight": HEAD[0]})),
            "transform AddToGradient: 'head.weight': must be of shape [10, 6], got shape [6]",
            id="transform of a wrong shape",
        ),
        pytest.param(
            trains(prepare=lambda c: Prepared(
                transforms=(ProjectOut({"fc1.weight": {"basis": torch.eye(10)[:, :2]}}),))),
            "must be a basis of 64 rows, the inputs of the weight, got a basis of 10 rows",
            id="basis of a wrong size",
        ),
        pytest.param(
            trains(prepare=lambda c: Prepared(transforms=(ProjectOut({}),) if c.id % 2 else ())),
            "prepare: transforms",
            id="other transforms on other clients",
        ),
        pytest.param(
            trains(prepare=lambda c: Prepared(
                transforms=(Proximal(c.params, 0.1, implicit=bool(c.id % 2)),))),
            "prepare: transforms",
            id="other settings of a transform on other clients",
        ),
        pytest.param(
            trains(prepare=lambda c: Prepared(tensors={"a" if c.id else "b": HEAD})),
            "prepare: tensors",
            id="other tensors on other clients",
        ),
        pytest.param(
            trains(prepare=lambda c: Prepared(initial_params={"hed.weight": HEAD})),
            "prepare: initial_params: must be one of fc1.weight, fc1.bias, head.weight, "
            "head.bias, got 'hed.weight'",
            id="initial value of an unknown parameter",
        ),
        pytest.param(
            trains(prepare=lambda c: {}), "prepare: must be a Prepared, got a dict", id="a dict"
        ),
        pytest.param(
            trains(private=("head.0.weight",)),
            "Train.private: must be one of fc1.weight, fc1.bias, head.weight, "
            "head.bias, got 'head.0.weight'",
            id="private",
        ),
        pytest.param(
            trains(trainable=("fc9.weight",)),
            "Train.trainable: must be one of fc1.weight, fc1.bias, head.weight, "
            "head.bias, got 'fc9.weight'",
            id="trainable",
        ),
        pytest.param(
            trains(extra_rows=lambda step: Rows(step.batch.x[:2], step.batch.y[:3], torch.ones(2))),
            "extra_rows: must be one x, y and mask per row, got 2 x, 3 y and 2 mask",
            id="rows that do not match",
        ),
        pytest.param(
            trains(extra_rows=lambda step: Rows(
                step.batch.x.flatten(1)[:2, :5], step.batch.y[:2], torch.ones(2))),
            "extra_rows: must be rows of shape [1, 8, 8], got rows of shape [5]",
            id="rows of a wrong shape",
        ),
        pytest.param(
            trains(make_upload=lambda c, local: ClientResult({"mine": Each({"a": HEAD})})),
            "make_upload: 'mine': must be a Sum, or announced by Needs.per_client_fields, "
            "got an Each",
            id="Each that is not announced",
        ),
        pytest.param(
            trains(make_upload=lambda c, local: ClientResult({"update": Each(local.update)})),
            "must be a Sum, or announced by Train(per_client_updates=True), got an Each",
            id="update as an Each",
        ),
        pytest.param(
            trains(make_upload=lambda c, local: ClientResult({"update": Sum({"head.bias": HEAD})})),
            "make_upload: 'update': 'head.bias': must be of shape [10], got shape [10, 6]",
            id="update of a wrong shape",
        ),
        pytest.param(
            trains(make_upload=lambda c, local: {"update": Sum(local.update)}),
            "make_upload: must be a ClientResult, got a dict",
            id="upload that is no result",
        ),
        pytest.param(
            trains(make_upload=lambda c, local: ClientResult(state={"a": 1})),
            "ClientResult.state: must be a Nothing (ClientState) or None, got a dict",
            id="client state of another class",
        ),
        pytest.param(
            trains(make_upload=lambda c, _: ClientResult({"x": Sum({"a": torch.ones(c.id + 1)})})),
            "Sum: 'a': must be of shape [1], which another client sent, got shape [2]",
            id="sums of different shapes",
        ),
        pytest.param(
            trains(make_upload=lambda c, local: ClientResult({"update": Sum(local.update, 0.0)})),
            "must be a field with a total weight that is not 0, got a total weight of 0",
            id="no weight at all",
        ),
        pytest.param(
            trains(adjust=lambda s, ch, u, c: replace(ch, state={"m": 1})),
            "adjust: state: must be a Nothing, got a dict",
            id="server state of another class",
        ),
        pytest.param(
            trains(broadcast=lambda s, c: {"x": 1.5}),
            "broadcast: 'x': must be tensors and dicts of them, got a float",
            id="broadcast of a number",
        ),
        pytest.param(
            lambda context: [Train(), Train()],
            "exchanges: must be a list with exactly one Train, got 2 of Train",
            id="two trainings",
        ),
        pytest.param(
            lambda context: [Exchange("a"), Train(), Exchange("a")],
            "exchanges: must be a list with each name once, got the names ['a', 'a']",
            id="two exchanges of one name",
        ),
        pytest.param(
            lambda context: [Train(), Exchange("a", client_work=lambda c: None)],
            "exchange 'a': must be a ClientResult, got None from client_work",
            id="work without a result",
        ),
        pytest.param(
            lambda context: [
                Train(),
                Exchange("a", client_work=lambda c: ClientResult({"x": Sum({"a": HEAD})})),
            ],
            "exchange 'a': must be a result without fields, since the exchange has no "
            "aggregate, got the fields ['x']",
            id="fields that nobody takes",
        ),
        pytest.param(
            lambda context: [
                Train(),
                Exchange(
                    "a",
                    client_work=lambda c: ClientResult({"x": Each({"a": HEAD})}),
                    aggregate=lambda s, u, c: s,
                ),
            ],
            "exchange 'a': 'x': must be a Sum, or announced by Needs.per_client_fields, "
            "got an Each",
            id="Each of an exchange that is not announced",
        ),
        pytest.param(
            lambda context: [Train(), Exchange("a", "none", aggregate=lambda s, u, c: s.params)],
            "exchange 'a': must be a Server, got a dict",
            id="aggregate that returns no server",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_on_both_engines(
    declared: Callable[[Any], list[Any]], words: str
) -> None:
    assert words in message_of(declared)


def test_a_stacked_upload_with_too_few_states() -> None:
    @stacked
    def upload(clients: Any, local: Any) -> ClientResult:
        return ClientResult(state=[])

    with pytest.raises(
        ContractError, match="state: must be a list of 3, one per client, got 0 states"
    ):
        run(trains(make_upload=upload), "vector")


def test_a_once_per_task_value_must_not_change() -> None:
    rounds = iter(range(100))

    def changing(server: Any, context: Any) -> dict[str, Any]:
        return {"z": OncePerTask(torch.tensor(float(next(rounds))))}

    train = {"rounds": 2, "batch_size": 8}
    with pytest.raises(ContractError, match="a OncePerTask value that changed within the task"):
        run(trains(broadcast=changing), "serial", train=train)


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_the_obvious_loss_is_fedavg(engine: str) -> None:
    """Unequal batches: padded rows must not count."""

    def loss(step: Any) -> torch.Tensor:
        return F.cross_entropy(step.logits(), step.batch.y, reduction="none")

    partition = {"count": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}}
    plain = run(trains(), engine, clients=partition)
    own = run(trains(loss=loss), engine, clients=partition)
    for name, value in plain.server.params.items():
        torch.testing.assert_close(own.server.params[name], value, rtol=0, atol=1e-6)


@dataclass(frozen=True)
class Kept:
    """A state."""

    a: dict[str, torch.Tensor] = field(default_factory=dict)
    b: int = 0


def test_a_saved_state_with_other_fields_is_refused() -> None:
    with pytest.raises(
        ContractError, match=r"a dict with the fields \['a', 'b'\], got \['a', 'c'\]"
    ):
        from_tree(Kept, {"a": {}, "c": 0})
    with pytest.raises(ContractError, match=r"state.a\['w'\]: must be a Tensor, got an int"):
        from_tree(Kept, {"a": {"w": 3}, "b": 0})


@dataclass(frozen=True)
class Forgotten(Method):
    """Has a loss that nothing calls."""

    def loss(self, step: Any) -> torch.Tensor:
        return step.logits().square().sum(1)


def test_a_function_that_nothing_calls_is_refused() -> None:
    with pytest.raises(UserError, match="Forgotten defines 'loss', which nothing calls"):
        build({"kind": f"{__name__}.Forgotten"})


@dataclass(frozen=True)
class Hiding(Method):
    """A hyperparameter with the name of a function of the contract."""

    diagnose: bool = False  # type: ignore[assignment]


@dataclass(frozen=True)
class Needy:
    """A state that cannot begin."""

    control: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Stateful(Method):
    """Its clients have no first state."""

    ClientState: ClassVar[type] = Needy


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Hiding, "Hiding has a hyperparameter 'diagnose', which hides the contract's"),
        (Stateful, "Stateful.ClientState cannot be made without arguments, allowed: a dataclass"),
    ],
)
def test_a_class_that_cannot_work_is_refused(kind: type, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build({"kind": f"{__name__}.{kind.__name__}"})


def test_nothing_is_a_state() -> None:
    assert from_tree(Nothing, {}) == Nothing()
    assert Change({}, {}, Nothing()).state == Nothing()
