"""Warnings that a run gives once, and a diverging run that names its likely cause."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.contract import (
    Change,
    CollectedUploads,
    Context,
    Diagnosis,
    Exchange,
    Method,
    Server,
    Train,
)
from perdure.core.errors import RunError
from perdure.core.trees import scaled

VALUES: dict[str, Any] = {
    "data": {"limit": 90, "test_limit": 30},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 3},
    "model": {"hidden": [6]},
    "train": {"rounds": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}


@dataclass(frozen=True)
class Explodes(Method):
    """FedAvg whose server multiplies the update in one round of the second task."""

    factor: float = float("nan")

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(adjust=self.multiply)]

    def multiply(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        factor = self.factor if (context.task, context.round) == (1, 1) else 1.0
        return Change(scaled(change.params, factor), change.buffers, change.state)

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        return Diagnosis(divergence=f"factor {self.factor:g} of explodes (try 1)")


@dataclass(frozen=True)
class Warns(Method):
    """FedAvg that warns of the same in every round, and of its task."""

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        texts = {"always": f"from task {context.task}", f"task {context.task}": "again"}
        return Diagnosis(warnings=texts)


def method(kind: type, **keys: Any) -> dict[str, Any]:
    return {**VALUES, "method": {"kind": kind, **keys}}


def texts(folder: Path) -> list[list[str]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [json.loads(line).get("warnings", []) for line in lines]


def test_a_method_warns_once_per_key_in_events_and_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = perdure.run(method(Warns), out=tmp_path / "run")
    assert texts(tmp_path / "run") == [["from task 0", "again"], [], [], ["again"], [], []]
    assert [w["key"] for w in result.values["warnings"]] == ["always", "task 0", "task 1"]
    assert caplog.text.count("from task 0") == 1


def test_a_resumed_run_does_not_warn_again(tmp_path: Path, monkeypatch: Any) -> None:
    class Stop(Exception):
        pass

    def stop(state: Any, event: dict[str, Any]) -> None:
        if event["event"] == "task":
            raise Stop

    with pytest.raises(Stop):
        perdure.run(method(Warns), out=tmp_path / "run", watch=stop)
    result = perdure.resume(tmp_path / "run")
    assert texts(tmp_path / "run") == [["from task 0", "again"], [], [], ["again"], [], []]
    assert len(result.values["warnings"]) == 3


def test_an_update_that_is_not_finite_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    with pytest.raises(RunError) as failure:
        perdure.run(method(Explodes), out=tmp_path / "run")
    assert str(failure.value) == (
        "task 2 round 2: the aggregated update is not finite; likely cause: factor nan of explodes "
        "(try 1), or train.lr 0.1 (try 0.01, or train.clip); the run stops at its last checkpoint"
    )
    assert len(texts(tmp_path / "run")) == 4  # two rounds and an end, and the round before


@pytest.mark.parametrize(("factor", "warned"), [(1.0, False), (1e6, True)])
def test_a_change_that_explodes_is_warned_of_with_its_cause(factor: float, warned: bool) -> None:
    warnings = perdure.run(method(Explodes, factor=factor)).values["warnings"]
    assert [(w["key"], w["task"], w["round"]) for w in warnings] == [("diverging", 1, 1)] * warned
    assert all(
        "times as long as the model; likely cause: factor 1e+06" in w["text"] for w in warnings
    )


@pytest.mark.parametrize(
    ("part", "hint"),
    [
        ({"kind": "ewc", "lambda": 50, "step": "gradient"},
         "lambda 50 of ewc with step: gradient (try 5, or step: implicit), or "),
        ({"kind": "stamp", "kappa": 0.5, "eta": 2.0, "scale": "published"},
         "eta 2 of stamp (try 1), or kappa 0.5 with scale: published (try a smaller kappa), or "),
        ({"kind": "fedomg", "kappa": 0.25, "scale": "paper"},
         "kappa 0.25 with scale: paper (try a smaller kappa), or "),
        ({"kind": "er", "with": [{"kind": "ewc", "lambda": 7}]},
         "lambda 7 of ewc (try 0.7), or "),
        ({"kind": "fedavg"}, ""),
    ],
)  # fmt: skip
def test_a_diverging_run_names_its_likely_cause(part: dict[str, Any], hint: str) -> None:
    train = VALUES["train"] | {"lr": 1e30, "batch_size": 2}
    with pytest.raises(RunError) as failure:
        perdure.run({**VALUES, "train": train, "method": part})
    assert str(failure.value) == (
        f"task 1 round 1: no client's update is finite; likely cause: {hint}"
        "train.lr 1e+30 (try 1e+29, or train.clip); the run stops at its last checkpoint"
    )


def test_a_long_step_of_the_server_is_a_cause_too() -> None:
    train = VALUES["train"] | {"lr": 1e30, "batch_size": 2, "server_lr": 3.0}
    with pytest.raises(RunError, match=r"or train\.server_lr 3 \(try 1\); the run stops"):
        perdure.run({**VALUES, "train": train})
