"""Kinds of methods that need more of the contract than the shipped ones use.

A generator that the server trains between tasks with no participants; a personal method whose
prediction depends on the client; a buffered aggregation that closes after k uploads; class means in
a task without training rounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from perdure.config import parse
from perdure.contract import (
    Change,
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    Exchange,
    Method,
    Needs,
    OncePerTask,
    Rows,
    Scalar,
    Server,
    Step,
    Sum,
    Train,
)
from perdure.core.trees import Tensors
from perdure.models.ops import ForwardPass, uniform_bits
from perdure.training.events import evaluators_of
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "data": {"limit": 200, "test_limit": 100},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [12]},
    "train": {"rounds": 2, "batch_size": 16, "lr": 0.1},
}


def run(method: Method, engine: str = "serial", **changes: Any) -> tuple[Experiment, RunState]:
    values = {**VALUES, "engine": {"kind": engine}, **changes}
    experiment = replace(build_experiment(parse(values)), method=method)
    return experiment, run_stream(experiment, experiment.initial_state(), lambda state, event: None)


def gap(a: RunState, b: RunState) -> float:
    pairs = ((value, b.server.params[name]) for name, value in a.server.params.items())
    return max(float((x - y).abs().max()) for x, y in pairs)


# ---- a generator on the server


@dataclass(frozen=True)
class Synthetic:
    """Server state: examples of the tasks so far, and the model that answers for them."""

    x: Tensor | None = None
    teacher: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Target(Method):
    """The server makes examples that its model is sure of; clients keep answering them alike."""

    batch: int = 8
    examples: int = 32
    ServerState: ClassVar[type] = Synthetic

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        later: dict[str, Any] = {
            "broadcast": self.send, "extra_rows": self.rows, "loss": self.loss,
            "penalty": self.distil,
        }  # fmt: skip
        train = Train(**later) if context.task else Train()
        return [train, Exchange("generate", "none", aggregate=self.generate)]

    def generate(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        draw = context.draw("generator")
        z = torch.randn(self.examples, 4, generator=draw)
        w = torch.randn(4, 64, generator=draw).requires_grad_()
        y = torch.randint(10, (self.examples,), generator=draw)
        for _ in range(10):
            logits = context.network.logits(
                server.params, z @ w, ForwardPass(buffers=server.buffers)
            )
            (grad,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, y), [w])
            w = (w - 0.5 * grad).detach().requires_grad_()
        return replace(server, state=Synthetic((z @ w).detach(), dict(server.params)))

    def send(self, server: Server, context: Context) -> dict[str, Any]:
        return {"x": OncePerTask(server.state.x), "teacher": OncePerTask(server.state.teacher)}

    def rows(self, step: Step) -> Rows:
        bits = uniform_bits(step.key, 1 << 20, self.batch, step.batch.x.device)
        x = step.broadcast["x"][((bits >> 21) * self.examples) >> 32]
        y = torch.zeros(self.batch, dtype=torch.int64)
        return Rows(x.reshape(-1, *step.batch.x.shape[1:]), y, torch.ones(self.batch))

    def loss(self, step: Step) -> Scalar:
        own = torch.ones_like(step.batch.y, dtype=torch.float32)
        own[step.extra] = 0
        return Scalar(step.mean(step.cross_entropy(step.logits()), among=own))

    def distil(self, step: Step) -> Scalar:
        taught = step.logits_of(step.broadcast["teacher"], {}).softmax(1)
        values = -(taught * step.logits().log_softmax(1)).sum(1)
        return Scalar(values[step.extra].mean())


def test_a_generator_is_trained_between_tasks_and_used_in_the_next() -> None:
    _, state = run(Target(), stream={"kind": "permuted", "tasks": 1})
    assert state.server.state.x.shape == (32, 64)
    assert state.ledger.by_field.keys() == {"down/params", "up/update"}  # nobody took part
    serial, vector = (run(Target(), engine, train={"rounds": 1})[1] for engine in ENGINES)
    assert gap(serial, vector) < 1e-5
    plain = run(Method())[1]
    assert gap(run(Target())[1], plain) > 1e-3
    sent = serial.ledger.by_field
    assert {"down/x", "down/teacher"} <= set(sent)


ENGINES = ("serial", "vector")


def test_rows_that_the_server_made_count_in_no_own_loss() -> None:
    """With a teacher that is not distilled from, the extra rows change nothing."""

    class Mute(Target):
        def distil(self, step: Step) -> Scalar:
            return Scalar(0.0 * step.logits().sum())

    assert gap(run(Mute())[1], run(Method())[1]) < 1e-6


# ---- a personal method


@dataclass(frozen=True)
class Prior:
    """Client state: the logarithm of its class counts."""

    shift: Tensor | None = None


@dataclass(frozen=True)
class FedPer(Method):
    """The head stays on the client, and so does a prior of its classes."""

    ClientState: ClassVar[type] = Prior

    @property
    def needs(self) -> Needs:
        return Needs(personal=True)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        head = context.network.head_names(dict.fromkeys(context.parameters), context.task)
        return [Train(private=head), Exchange("count", client_work=self.count)]

    def count(self, client: Client) -> ClientResult:
        labels = client.data.targets[client.data.index]
        return ClientResult(state=Prior((torch.bincount(labels, minlength=10) + 1.0).log()))

    def predict(
        self, server: Server, x: Tensor, network: Any, client_state: Any = None, task: Any = None
    ) -> Tensor:
        logits = super().predict(server, x, network)
        return logits if client_state.shift is None else logits + client_state.shift


@pytest.mark.parametrize("engine", ENGINES)
def test_private_parameters_stay_on_clients(engine: str) -> None:
    experiment, state = run(FedPer(), engine)
    heads = [experiment.client_state(client)[1]["head.weight"] for client in range(4)]
    assert all(not torch.equal(heads[0], other) for other in heads[1:])
    first = experiment.initial_state().server.params["head.weight"]
    torch.testing.assert_close(state.server.params["head.weight"], first)  # nobody ever sent one
    fedavg = run(Method(), engine)[1].ledger.by_field
    head = sum(state.server.params[name].nbytes for name in ("head.weight", "head.bias"))
    uploads = 4 * 2 * 2  # clients, rounds, tasks
    saved = fedavg["up/update"] - state.ledger.by_field["up/update"]
    assert saved > uploads * head  # and the header of two tensors each


@pytest.mark.parametrize("engine", ENGINES)
def test_private_parameters_of_a_client_persist_between_rounds(engine: str) -> None:
    """With one client it makes no difference who keeps the head: the model is FedAvg's."""
    experiment, state = run(FedPer(), engine, clients={"count": 1})
    fedavg = run(Method(), engine, clients={"count": 1})[1].server.params
    own = state.server.params | experiment.client_state(0)[1]
    for name, value in fedavg.items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=1e-6)


def test_engines_agree_on_private_parameters() -> None:
    (one, serial), (two, vector) = (run(FedPer(), engine) for engine in ENGINES)
    assert gap(serial, vector) < 1e-5
    for client in range(4):
        mine, other = (made.client_state(client)[1] for made in (one, two))
        torch.testing.assert_close(mine["head.bias"], other["head.bias"], rtol=0, atol=1e-5)


def test_accuracy_is_the_mean_over_the_clients() -> None:
    experiment, state = run(FedPer())
    models = evaluators_of(experiment, replace(state, task=1))
    assert len(models) == 4
    each = [
        evaluator.evaluate(experiment.task(0)).accuracy["task_agnostic"] for evaluator in models
    ]
    assert len(set(each)) > 1  # prediction depends on the client
    assert state.matrix["task_agnostic"][1][0] == pytest.approx(np.mean(each))


def test_a_personal_model_is_looked_at_within_a_task_too() -> None:
    values = {**VALUES, "engine": {"kind": "serial"}, "runs": {"evaluate_every": 1}}
    experiment = replace(build_experiment(parse(values)), method=FedPer())
    seen: list[Any] = []
    run_stream(experiment, experiment.initial_state(), lambda state, event: seen.append(event))
    rounds = [event["accuracy"]["task_agnostic"] for event in seen if event["event"] == "round"]
    ends = [event["accuracy"]["task_agnostic"] for event in seen if event["event"] == "task"]
    assert len(rounds) == 4
    assert rounds[1] != ends[0][0]  # the prior comes at the end of a task


# ---- buffered aggregation


@dataclass(frozen=True)
class FedBuff(Method):
    """A round closes after k uploads; late ones count less."""

    k: int = 2
    seen: ClassVar[list[dict[int, int]]] = []

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(buffer_size=self.k, staleness_weight=discount, adjust=self.note)]

    def note(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        self.seen.append(dict(uploads.staleness))
        return change


def discount(staleness: int) -> float:
    return (1 + staleness) ** -0.5


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_closes_after_k_uploads(engine: str) -> None:
    FedBuff.seen.clear()
    run(FedBuff(2), engine, train={"rounds": 4, "batch_size": 16})
    sizes = [len(each) for each in FedBuff.seen]
    assert sizes[:3] == [2, 2, 2]
    assert sizes[3] >= 2  # the last round of a task waits for all
    late = [age for each in FedBuff.seen for age in each.values()]
    assert max(late) > 0
    assert min(late) == 0
    assert not run(FedBuff(2), engine)[1].pending_uploads


# ---- no training rounds


@dataclass(frozen=True)
class Means:
    """Server state: the mean feature of every class, and how many examples it is of."""

    sums: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True)
class ClassMeans(Method):
    """Nothing is trained: the nearest mean feature of a class answers."""

    ServerState: ClassVar[type] = Means

    @property
    def needs(self) -> Needs:
        return Needs(prediction_state=("sums", "counts"))

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        means = Exchange("means", client_work=self.sums, aggregate=self.gather)
        return [Train(rounds=0), means]

    def sums(self, client: Client) -> ClientResult:
        total, counts = torch.zeros(10, 12), torch.zeros(10)
        for batch in client.data.batches():
            total.index_add_(0, batch.y, client.features(batch))
            counts += torch.bincount(batch.y, minlength=10)
        return ClientResult({"means": Sum({"sums": total, "counts": counts}, weight=1.0)})

    def gather(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        new, old = uploads.total("means"), server.state
        if old.sums is not None:
            new = {"sums": new["sums"] + old.sums, "counts": new["counts"] + old.counts}
        return replace(server, state=Means(**new))

    def predict(
        self, server: Server, x: Tensor, network: Any, client_state: Any = None, task: Any = None
    ) -> Tensor:
        means = server.state.sums / server.state.counts.clamp(min=1).unsqueeze(1)
        features = network.features(server.params, x, ForwardPass(buffers=server.buffers))
        return -torch.cdist(features, means)


def test_class_means_without_a_training_round() -> None:
    experiment, state = run(ClassMeans())
    assert state.counters.rounds == 0
    assert set(state.ledger.by_field) == {"down/params", "up/means"}
    started = experiment.initial_state().server.params
    assert all(torch.equal(value, started[name]) for name, value in state.server.params.items())
    task = experiment.task(1)
    rows = torch.arange(len(task.train.y))
    features = experiment.network.features(started, task.train.gather(rows), ForwardPass())
    first = experiment.task(0)
    before = experiment.network.features(started, first.train.gather(rows), ForwardPass())
    for label in range(10):
        mine = torch.cat([features[task.train.y == label], before[first.train.y == label]])
        mean = state.server.state.sums[label] / state.server.state.counts[label]
        torch.testing.assert_close(mean, mine.mean(0), rtol=1e-4, atol=1e-5)
    assert state.matrix["task_agnostic"][0][0] > 0.5
