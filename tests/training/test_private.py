"""Private parameters: trained on a client, never sent, and restored in its next round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from perdure.config import parse
from perdure.contract import (
    Change,
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    ContractError,
    Exchange,
    LocalUpdate,
    Method,
    Prepared,
    Server,
    Sum,
    Train,
    stacked,
)
from perdure.core.trees import Tensors
from perdure.evaluation.metrics import make_metrics
from perdure.training.events import evaluators_of
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.ledger import encode
from perdure.training.loop import run_stream
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "data": {"limit": 120, "test_limit": 60},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 4, "per_round": 2},
    "model": {"hidden": [6], "norm": "batch"},
    "train": {"rounds": 3, "batch_size": 16, "lr": 0.1},
}
HEAD = ("head.weight", "head.bias")
ENGINES = ("serial", "vector")


@dataclass(frozen=True)
class Private(Method):
    """The head stays on the client; what clients begin with and the server sees is noted."""

    begins: ClassVar[list[tuple[int, int, int, Tensors]]] = []
    arrived: ClassVar[list[set[str]]] = []

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [
            Train(private=HEAD, prepare=self.look, make_upload=self.upload, adjust=self.note),
            Exchange("end", client_work=self.end, aggregate=self.ignore),
        ]

    def look(self, client: Client) -> Prepared:
        own = {name: client.params[name].clone() for name in HEAD}
        self.begins.append((client.context.task, client.context.round, client.id, own))
        return Prepared()

    @stacked
    def upload(self, clients: list[Client], local: LocalUpdate) -> ClientResult:
        assert not set(HEAD) & set(local.update)
        return ClientResult()

    def note(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        self.arrived.append({name for values in uploads.sums.values() for name in values})
        return change

    def end(self, client: Client) -> ClientResult:
        own = {name: client.params[name].clone() for name in HEAD}
        self.begins.append((client.context.task, client.context.round, client.id, own))
        return ClientResult({"n": Sum({"n": torch.ones(())})})

    def ignore(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        return server


@pytest.fixture(autouse=True)
def _nothing_seen_yet() -> None:
    Private.begins.clear()
    Private.arrived.clear()


def experiment_on(engine: str, kind: str = "Private") -> Experiment:
    method = {"kind": f"{__name__}.{kind}"}
    return build_experiment(parse({**VALUES, "method": method, "engine": {"kind": engine}}))


@pytest.mark.parametrize("engine", ENGINES)
def test_private_parameters_are_neither_sent_nor_received(engine: str) -> None:
    experiment = experiment_on(engine)
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    first = experiment.initial_state().server.params
    assert all(torch.equal(state.server.params[name], first[name]) for name in HEAD)
    assert not torch.equal(state.server.params["fc1.weight"], first["fc1.weight"])
    assert all(not set(HEAD) & names for names in Private.arrived)
    assert all("fc1.weight" in names for names in Private.arrived)
    sent = {name: value for name, value in state.server.params.items() if name not in HEAD}
    rounds, members, ends = 2 * 3, 2, 2 * 4
    assert state.ledger.by_field["up/update"] == rounds * members * len(encode(sent))
    assert state.ledger.by_field["down/params"] == (rounds * members + ends) * len(encode(sent))
    assert "down/frozen" not in state.ledger.by_field


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_continues_with_its_private_parameters(engine: str) -> None:
    experiment = experiment_on(engine)
    kept: dict[int, Tensors] = {}
    first = experiment.initial_state().server.params

    def after(state: RunState, event: Any) -> None:
        for task, round_, client, own in Private.begins:
            expected = kept.get(client, first)
            at = (task, round_, client)
            assert all(torch.equal(own[name], expected[name]) for name in HEAD), at
        Private.begins.clear()
        for client in experiment.store.clients():
            kept[client] = experiment.client_state(client)[1]

    state = run_stream(experiment, experiment.initial_state(), after)
    assert state.task == 2
    heads = [own["head.weight"] for own in kept.values()]
    assert len(heads) == 4
    for k, head in enumerate(heads):
        assert not torch.equal(head, first["head.weight"])
        assert all(not torch.equal(head, other) for other in heads[:k])


def test_the_worst_client_is_that_of_the_worst_model() -> None:
    metrics = make_metrics(["accuracy", "worst_client"])
    experiment = replace(experiment_on("serial"), metrics=metrics)
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    models = evaluators_of(experiment, replace(state, task=1, round=3))
    for task in range(2):
        each = [model.evaluate(experiment.task(task)).accuracy["task_aware"] for model in models]
        assert state.scores["worst_client"]["task_aware"][1][task] == min(each) < max(each)
        by_client = state.client_scores[task]
        assert [by_client[str(c)]["accuracy"]["task_aware"] for c in range(4)] == each


@dataclass(frozen=True)
class Bad(Private):
    """Client 1 sends what is not finite."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(private=HEAD, make_upload=self.spoil)]

    def spoil(self, client: Client, local: LocalUpdate) -> ClientResult:
        factor = float("nan") if client.id == 1 else 1.0
        update = {name: factor * value for name, value in local.update.items()}
        return ClientResult({"update": Sum(update)})


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rejected_client_keeps_its_private_parameters(engine: str) -> None:
    experiment = experiment_on(engine, "Bad")
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    assert state.counters.rejected
    assert set(experiment.store.clients()) == {0, 2, 3}


@pytest.mark.parametrize("engine", ENGINES)
def test_accuracy_is_the_mean_over_the_models_of_the_clients(engine: str) -> None:
    experiment = experiment_on(engine)
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    at_end = replace(state, task=1, round=3)
    for task in range(2):
        each = []
        for client in range(4):
            own = experiment.client_state(client)[1]
            server = replace(state.server, params=state.server.params | own)
            (evaluator,) = (
                j for j in evaluators_of(experiment, at_end) if _same_head(j.server, own)
            )
            assert evaluator.server.params["fc1.weight"] is server.params["fc1.weight"]
            each.append(evaluator.evaluate(experiment.task(task)).accuracy["task_agnostic"])
        assert state.matrix["task_agnostic"][1][task] == pytest.approx(np.mean(each))
        assert len(set(each)) > 1


def _same_head(server: Server, own: Tensors) -> bool:
    return all(torch.equal(server.params[name], own[name]) for name in HEAD)


@dataclass(frozen=True)
class Unknown(Method):
    """Keeps what is not trained."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(trainable=("fc1.weight",), private=("head.weight",))]


@pytest.mark.parametrize("engine", ENGINES)
def test_only_trained_parameters_can_be_private(engine: str) -> None:
    experiment = experiment_on(engine, "Unknown")
    with pytest.raises(
        ContractError,
        match=r"^Train\.private: must be fc1\.weight, got 'head\.weight' \(did you mean",
    ):
        run_stream(experiment, experiment.initial_state(), lambda *_: None)
