"""FOT's GPSE when the next task begins (closing: false), and layers whose space is used up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from subspace_runs import SMALL, experiment_of

import perdure
from perdure.contract import Exchange, Train
from perdure.contract.exchanges import split_exchanges
from perdure.core.errors import ContractError
from perdure.core.event_log import EventTotals
from perdure.methods.fot import ProtectedState
from perdure.training.loop import begin_task, run_stream
from perdure.training.privacy import Releases
from perdure.training.state import RunState

TASKS = 3
OPEN = {"kind": "fot", "threshold": 0.8, "sketch_ratio": 2.0, "closing": False}
CLOSED = OPEN | {"closing": True}
SPLIT = {"stream": {"kind": "split", "tasks": TASKS, "classes_per_task": 3}}
SETTINGS: dict[str, dict[str, Any]] = {
    "shared head": {},
    "growing head": SPLIT | {"model": {**SMALL["model"], "head": "growing"}},
    "few clients hold a task": {"stream": {"tasks": TASKS, "presence": 0.5}},
    "rounds by task": {"train": {**SMALL["train"], "rounds": [3, 1, 2]}},
    "secure sums": {"privacy": {"secagg": True}},
}


def values(method: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {**SMALL, "runs": {"report": False}, **sections, "method": method}


def outcome(result: perdure.Result) -> tuple[Any, ...]:
    found = result.values
    return found["model_sha256"], found["matrix"], found["metrics"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_model_is_the_same_and_one_gpse_is_not_sent(setting: str) -> None:
    closed, left_open = (perdure.run(values(m, **SETTINGS[setting])) for m in (CLOSED, OPEN))
    assert outcome(closed) == outcome(left_open)
    sent, fewer = (r.values["bytes"]["by_field"] for r in (closed, left_open))
    if setting != "few clients hold a task":
        assert fewer["up/sketch"] == sent["up/sketch"] * (TASKS - 1) / TASKS
    assert fewer["up/update"] == sent["up/update"]
    assert fewer["down/spaces"] == sent["down/spaces"]  # clients have them since training
    assert fewer["up/sketch"] < sent["up/sketch"]


def test_gpse_is_counted_in_the_task_that_begins() -> None:
    by_task = perdure.run(values(OPEN)).values["bytes"]["by_task"]
    closed = perdure.run(values(CLOSED)).values["bytes"]["by_task"]
    assert by_task[0]["up"] < closed[0]["up"]
    assert [task["up"] for task in by_task[1:]] == [task["up"] for task in closed[1:]]


def test_the_bytes_of_the_events_add_up_to_those_of_the_result() -> None:
    totals = EventTotals()
    result = perdure.run(values(OPEN), watch=lambda state, event: totals.add(event))
    assert totals.bytes == {way: result.values["bytes"][way] for way in ("up", "down")}


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_run_that_goes_on_later_makes_it_up_first(tasks: int) -> None:
    """It equals the longer run: weights, protected spaces and bytes."""

    def trained(count: int, state: RunState | None = None) -> RunState:
        experiment = experiment_of(OPEN, stream={"tasks": count})
        return run_stream(experiment, state or experiment.initial_state(), lambda *_: None)

    short = trained(tasks)
    assert len(short.server.state.spaces) == (3 if tasks > 1 else 0)
    tree, method = short.to_tree(), experiment_of(OPEN).method
    extended = trained(TASKS, RunState.from_tree(tree, method))
    whole = trained(TASKS)
    for name, value in whole.server.params.items():
        assert torch.equal(value, extended.server.params[name]), name
    for name, space in whole.server.state.spaces.items():
        assert all(torch.equal(b, extended.server.state.spaces[name][k]) for k, b in space.items())
    assert (extended.ledger.up, extended.ledger.down) == (whole.ledger.up, whole.ledger.down)


def test_a_run_that_was_stopped_between_two_tasks_goes_on_the_same(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(state: Any, event: dict[str, Any]) -> None:
        if event["event"] == "task":
            raise Stop

    with pytest.raises(Stop):
        perdure.run(values(OPEN), out=tmp_path / "run", watch=stop)
    resumed, whole = perdure.resume(tmp_path / "run"), perdure.run(values(OPEN))
    assert outcome(resumed) == outcome(whole)
    assert resumed.values["bytes"]["by_task"] == whole.values["bytes"]["by_task"]


def test_a_combination_defers_the_parts_exchange() -> None:
    part = {"with": [{"kind": "special", "lambda": 0.1}]}
    closed, left_open = (perdure.run(values({**m, **part})) for m in (CLOSED, OPEN))
    assert outcome(closed) == outcome(left_open)
    assert left_open.values["bytes"]["up"] < closed.values["bytes"]["up"]


def test_noise_is_accounted_for_the_exchanges_that_ran() -> None:
    """Two rounds in each of three tasks, and GPSE after all of them or all but the last."""
    train = SMALL["train"] | {"weighting": "uniform"}
    privacy = {"clip": 1.0, "noise": 1.0, "task_end": True}

    def uploads(method: dict[str, Any]) -> list[int]:
        experiment = experiment_of(method, train=train, privacy=privacy)
        found: list[int] = []

        def count(state: RunState, event: dict[str, Any]) -> None:
            found.append(Releases(experiment, state).most_uploads)

        run_stream(experiment, experiment.initial_state(), count)
        return found

    assert uploads(CLOSED)[-1] == 3 * TASKS
    assert uploads(OPEN) == [1, 2, 2 + 1, 4, 5, 5 + 1, 7, 8, 8]


def test_an_opening_exchange_cannot_be_deferred() -> None:
    with pytest.raises(ContractError, match="'a' deferred before Train"):
        split_exchanges([Exchange("a", deferred=True), Train()])


def test_a_layer_that_is_nearly_used_up_is_warned_of_once() -> None:
    found = perdure.run(values(CLOSED | {"threshold": 0.999})).values["warnings"]
    keys = [w["key"] for w in found]
    assert len(keys) == len(set(keys)) > 0
    assert "space of fc2.weight" in keys
    events: list[dict[str, Any]] = []
    perdure.run(values(CLOSED | {"threshold": 0.999}), watch=lambda _, event: events.append(event))
    used = [event["method"]["used"] for event in events if event["event"] == "task"]
    full = {f"space of {name}" for each in used for name, part in each.items() if part > 0.9}
    assert full == set(keys)
    assert not perdure.run(values(CLOSED | {"threshold": 0.3})).values["warnings"]


@pytest.mark.parametrize(("columns", "warned"), [(57, False), (58, True)])
def test_the_warning_begins_above_nine_tenths_of_a_layers_inputs(
    columns: int, warned: bool
) -> None:
    experiment = experiment_of(CLOSED)
    state = experiment.initial_state()
    begin_task(experiment, state)
    spaces = {"fc1.weight": {"basis": torch.eye(64)[:, :columns]}}  # 57 / 64 = 0.891
    server = replace(state.server, state=ProtectedState(spaces))
    found = experiment.method.diagnose(server, experiment.context(state)).warnings
    assert ("space of fc1.weight" in found) == warned
