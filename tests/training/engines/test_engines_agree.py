"""Vector must equal serial up to float rounding: for every model and for unequal client sizes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import perdure
from perdure.config import parse
from perdure.contract import Context, Exchange, Method, Step, Train
from perdure.training.engines import traced_steps as steps
from perdure.training.engines.serial import SerialEngine
from perdure.training.engines.vector import VectorEngine
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

TINY: dict[str, Any] = {
    "data": {"limit": 60},
    "stream": {"tasks": 2},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.3}},
    "train": {"rounds": 2, "local_epochs": 2, "batch_size": 8, "lr": 0.05},
}


FEW = {
    "stream": {"tasks": 1},
    "train": {"rounds": 2, "max_steps": 2, "batch_size": 8, "lr": 0.01},
}
"""Four steps, of which the vector engine traces the last: convolutions amplify rounding, and where
one unit lands on the other side of zero weights move by a hundredth, on some processors."""


def final(values: dict[str, Any], engine: str, chunk: int | None = None) -> RunState:
    options = {"kind": engine} if chunk is None else {"kind": engine, "chunk": chunk}
    config = parse({**values, "engine": options})
    experiment = build_experiment(config)
    return run_stream(experiment, experiment.initial_state(), lambda *_: None)


def assert_same(values: dict[str, Any], chunk: int | None = None, tolerance: float = 2e-5) -> None:
    one, other = final(values, "serial").server, final(values, "vector", chunk).server
    assert one.params.keys() == other.params.keys()
    for name, value in (one.params | one.buffers).items():
        theirs = (other.params | other.buffers)[name]
        torch.testing.assert_close(value, theirs, rtol=1e-3, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "mlp", "hidden": [20, 20]},
        {"kind": "mlp", "hidden": [16], "dropout": [0.1, 0.5]},
        {"kind": "mlp", "hidden": [16], "norm": "batch"},
        {"kind": "conv", "width": 4},
        {"kind": "conv", "width": 4, "norm": "group", "dropout": 0.2},
    ],
    ids=str,
)
def test_every_model(model: dict[str, Any]) -> None:
    few = FEW if model["kind"] == "conv" else {}
    assert_same({**TINY, **few, "model": model})


@pytest.mark.parametrize("norm", ["group", pytest.param("none", marks=pytest.mark.slow)])
def test_twenty_layers(norm: str) -> None:
    assert_same({**TINY, **FEW, "model": {"kind": "resnet20", "norm": norm, "width": 4}})


@pytest.mark.parametrize("kind", ["alexnet", "resnet18-reduced", "resnet18", "resnet32"])
def test_every_large_model(kind: str) -> None:
    small = {"limit": 24, "size": 32 if kind == "alexnet" else 8}
    values = {
        **TINY,
        "data": small,
        "stream": {"tasks": 1},
        "clients": {"count": 2},
        "train": {"rounds": 1, "batch_size": 8, "lr": 0.01},
        "model": {"kind": kind, "width": 4, "norm": "group"},
    }
    assert_same(values)


@pytest.mark.parametrize(
    ("changes", "recordings"),
    [
        ({}, 1),
        ({"model": {"hidden": [8], "head": "growing"}, "stream": {"kind": "split", "tasks": 2}}, 2),
        ({"model": {"hidden": [8], "norm": "batch"}, "method": {"kind": "fedprotip"}}, 2),
    ],
    ids=["same shapes", "other names", "batch norm frozen in the second task"],
)
def test_a_trace_is_reused_in_tasks_of_the_same_shapes(
    changes: dict[str, Any], recordings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, record = [], steps.trace

    def counted(step: Any, inputs: Any) -> Any:
        recorded.append(1)
        return record(step, inputs)

    monkeypatch.setattr(steps, "trace", counted)
    alike = {"clients": {"count": 2}, "model": {"hidden": [8]}, "data": {"limit": 80}}
    train = {"rounds": 2, "local_epochs": 2, "batch_size": 10, "lr": 0.05}
    assert_same({"stream": {"tasks": 2}, "train": train, **alike, **changes})
    assert len(recorded) == recordings


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "flwf-2t"},
        {"kind": "fedprox", "mu": 1.0, "with": [{"kind": "special-c"}]},
        {"kind": "fedprox", "mu": 1.0, "with": [{"kind": "lwf"}]},
    ],
    ids=str,
)
def test_a_step_traced_while_teacher_and_model_are_one_object_separates_them_later(
    method: dict[str, Any],
) -> None:
    """In a task's first round clients receive the same tensors under both names."""
    alike = {"clients": {"count": 2}, "model": {"hidden": [8]}, "data": {"limit": 80}}
    train = {"rounds": 3, "local_epochs": 2, "batch_size": 10, "lr": 0.2}
    assert_same({"stream": {"tasks": 2}, "train": train, **alike, "method": method})


def test_an_engine_that_served_another_run_has_forgotten_it() -> None:
    engine, values = VectorEngine(), {**TINY, "model": {"hidden": [8]}, "data": {"limit": 200}}
    decayed = {**values, "train": {**TINY["train"], "weight_decay": 0.1}}
    fresh = perdure.run(decayed, engine=VectorEngine()).values["model_sha256"]
    perdure.run(values, engine=engine)
    assert perdure.run(decayed, engine=engine).values["model_sha256"] == fresh


def test_batch_norm_leaves_padding_out() -> None:
    """Residual nets amplify rounding through tiny batches: one round, float noise only."""
    model = {"kind": "resnet20", "norm": "batch", "width": 4}
    train = {"rounds": 1, "batch_size": 8, "lr": 0.01}
    assert_same({**TINY, "stream": {"tasks": 1}, "model": model, "train": train}, tolerance=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
def test_the_chunk_does_not_matter(chunk: int) -> None:
    assert_same({**TINY, "model": {"hidden": [12]}}, chunk)


@pytest.mark.parametrize(
    "train",
    [
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01},
        {"optimizer": "adam", "lr": 0.002, "weight_decay": 0.01},
        {"optimizer": "adamw", "lr": 0.002, "weight_decay": 0.1},
        {"clip": 0.1},
        {"max_steps": 3},
        {"weighting": "uniform"},
    ],
    ids=str,
)
def test_every_way_to_train(train: dict[str, Any]) -> None:
    assert_same({**TINY, "model": {"hidden": [12]}, "train": {**TINY["train"], **train}})


@pytest.mark.parametrize(
    "stream",
    [
        {"kind": "split", "tasks": 3, "classes_per_task": 3},
        {"kind": "pool", "tasks": 2, "classes_per_task": 3},
        {"kind": "permuted", "tasks": 3, "presence": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("outputs", ["task", "seen", "all"])
def test_every_stream_and_mask(stream: dict[str, Any], outputs: str) -> None:
    train = {**TINY["train"], "outputs": outputs}
    partition = {"kind": "iid"}
    clients = {"count": 4, "partition": partition}
    values = {**TINY, "data": {"limit": 120}, "clients": clients, "train": train, "stream": stream}
    assert_same({**values, "model": {"hidden": [12]}})


def test_a_growing_head() -> None:
    stream = {"kind": "split", "tasks": 3, "classes_per_task": 3}
    values = {**TINY, "stream": stream, "model": {"hidden": [12], "head": "growing"}}
    assert_same(values)
    params = final(values, "vector").server.params
    assert [n for n in params if n.startswith("head.") and n.endswith("weight")] == [
        "head.0.weight",
        "head.1.weight",
        "head.2.weight",
    ]


def test_fedprox() -> None:
    assert_same({**TINY, "method": {"kind": "fedprox", "mu": 0.5}})


@dataclass(frozen=True)
class BranchesOnValues(Method):
    """A loss that cannot be vectorized: Python looks at a tensor's value."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(loss=self.loss)]

    def loss(self, step: Step) -> Tensor:
        rows = step.cross_entropy(step.logits())
        return rows * 2 if float(rows.detach().mean()) > 1 else rows


def test_clients_that_cannot_be_stacked_train_serially_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = {**TINY, "method": {"kind": f"{__name__}.BranchesOnValues"}}
    with caplog.at_level(logging.WARNING):
        assert_same(values)
    assert sum("cannot be stacked" in record.message for record in caplog.records) == 1


def test_auto_keeps_its_choice() -> None:
    experiment = build_experiment(parse({**TINY, "engine": {"kind": "auto"}}))
    run_stream(experiment, experiment.initial_state(), lambda *_: None)
    engine: Any = experiment.engine
    assert isinstance(engine.chosen, SerialEngine | VectorEngine)
    twin: Any = build_experiment(experiment.config).engine
    twin.restore(engine.choice())
    assert (twin.name, twin.choice()) == (engine.name, engine.choice())


def test_the_same_run_twice_is_the_same_bit_for_bit() -> None:
    for engine in ("serial", "vector"):
        values = {**TINY, "engine": {"kind": engine}}
        hashes = {perdure.run(values).values["model_sha256"] for _ in range(2)}
        assert len(hashes) == 1


def test_a_trial_takes_the_seconds_per_client(monkeypatch: pytest.MonkeyPatch) -> None:
    from perdure.training.engines import auto

    times = iter([10.0, 16.0])
    monkeypatch.setattr(auto.time, "perf_counter", lambda: next(times))
    assert auto.TimedTrial(lambda: None, clients=3).seconds() == 2.0


def test_trials_are_of_stacks_of_the_chunks_that_they_stand_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from perdure.training.engines import auto

    stacks: list[int] = []

    def trial(training: Any, clients: list[Any]) -> auto.TimedTrial:
        stacks.append(len(clients))
        return auto.TimedTrial(lambda: None, len(clients))

    monkeypatch.setattr(auto, "serial_trial", trial)
    monkeypatch.setattr(auto, "vector_trial", trial)
    training: Any = None
    seconds = auto.seconds_per_client(training, list(range(10)), [2, 4, 8])
    assert stacks == [2, 2, 4, 8]
    assert set(seconds) == {0, 2, 4, 8}


def test_a_trial_of_work_that_cannot_be_stacked_takes_for_ever() -> None:
    from perdure.training.engines import auto

    def fails() -> None:
        raise RuntimeError("no batching rule")

    assert auto.TimedTrial(fails, clients=1).seconds() == float("inf")
