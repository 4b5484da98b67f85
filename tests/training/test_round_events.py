"""Events of rounds: the training loss, and accuracy on all tasks so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import perdure
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.report.accuracy import accuracies, losses, round_figures
from perdure.runs.records import read_runs
from perdure.runs.tracking.event_metrics import EventMetrics
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream

VALUES: dict[str, Any] = {
    "seed": 3,
    "data": {"source": "digits", "limit": 90, "test_limit": 60},
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"kind": "mlp", "hidden": [7], "head": "growing"},
    "train": {"rounds": 3, "batch_size": 8, "lr": 0.1},
    "engine": {"kind": "serial"},
}


def run(**sections: Any) -> list[dict[str, Any]]:
    """The events of a run in memory."""
    values = {key: {**VALUES.get(key, {}), **section} for key, section in sections.items()}
    experiment, events = build_experiment(parse(VALUES | values)), []
    run_stream(experiment, experiment.initial_state(), lambda state, event: events.append(event))
    return events


def rounds(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "round"]


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_the_loss_of_one_step_is_that_of_all_rows(engine: str) -> None:
    """Clients weigh as many examples as they have, so their mean is that of all rows."""
    train = {"rounds": 1, "batch_size": 100, "max_steps": 1}
    (event, *_) = run(train=train, engine={"kind": engine})
    experiment = build_experiment(parse(VALUES))
    task = experiment.task(0)
    params = experiment.grow(experiment.initial_state().server.params, 0)
    rows = task.partition.rows
    hidden = F.relu(
        task.train.gather(rows).flatten(1) @ params["fc1.weight"].T + params["fc1.bias"]
    )
    logits = hidden @ params["head.0.weight"].T + params["head.0.bias"]
    targets = torch.searchsorted(torch.tensor(task.classes), task.train.y[rows])
    expected = F.cross_entropy(logits, targets)
    assert event["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_engines_agree_on_the_loss_and_it_falls() -> None:
    serial, vector = (
        [event["loss"] for event in rounds(run(engine={"kind": kind}))]
        for kind in ("serial", "vector")
    )
    assert vector == pytest.approx(serial, rel=1e-4)
    assert serial[2] < serial[0]


def test_the_loss_is_left_out_where_uploads_are_noisy() -> None:
    assert all("loss" not in event for event in run(privacy={"clip": 1.0, "noise": 0.5}))
    plain, masked = run(), run(privacy={"secagg": True})
    for event, other in zip(rounds(plain), rounds(masked), strict=True):
        assert other["loss"] == pytest.approx(event["loss"], rel=1e-4)


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    with pytest.raises(perdure.PerdureError):
        run(train={"lr": 1e30})


def test_all_tasks_are_evaluated_by_round() -> None:
    runs = {"evaluate_every": 1, "evaluate_all": True}
    events = run(runs=runs)
    ends = [event for event in events if event["event"] == "task"]
    last = [event for event in rounds(events) if event["round"] == 2]
    for task, (event, end) in enumerate(zip(last, ends, strict=True)):
        assert len(event["accuracies"]["task_aware"]) == task + 1
        assert event["accuracies"]["task_aware"][-1] == event["accuracy"]["task_aware"]
        assert event["accuracies"]["task_aware"] == end["accuracy"]["task_aware"][: task + 1]
    assert all("accuracies" not in event for event in run(runs={"evaluate_every": 1}))
    every_other = rounds(run(runs={"evaluate_every": 2, "evaluate_all": True}))
    assert ["accuracies" in event for event in every_other] == [False, True, False] * 2


def test_evaluate_all_needs_its_rounds() -> None:
    with pytest.raises(UserError, match=r"runs\.evaluate_every: must be a number"):
        parse({"runs": {"evaluate_all": True}})


class _Stop(Exception):
    pass


def test_a_resumed_run_has_the_same_events(tmp_path: Path) -> None:
    values = VALUES | {"runs": {"evaluate_every": 1, "evaluate_all": True}}
    perdure.run(values, out=tmp_path / "whole")

    def stop(state: Any, event: dict[str, Any]) -> None:
        if state.counters.rounds == 4:
            raise _Stop

    with pytest.raises(_Stop):
        perdure.run(values, out=tmp_path / "parts", watch=stop)
    perdure.resume(tmp_path / "parts")
    whole, parts = (
        [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    keys = ("event", "loss", "accuracy", "accuracies")
    pairs = [[{key: e.get(key) for key in keys} for e in events] for events in (whole, parts)]
    assert [e for e in pairs[0] if e["event"] in ("round", "task")] == [
        e for e in pairs[1] if e["event"] in ("round", "task")
    ]


def test_the_report_draws_them(tmp_path: Path) -> None:
    perdure.run(VALUES | {"runs": {"evaluate_every": 1, "evaluate_all": True}}, out=tmp_path / "a")
    figures = {
        figure.key: figure for figure in round_figures(read_runs([tmp_path]), ["task_aware"])
    }
    assert list(figures) == [
        "training-loss", "average-by-round-task_aware", "tasks-by-round-task_aware-0"
    ]  # fmt: skip
    assert len(figures["training-loss"].series[0].points) == 6
    first, second = figures["tasks-by-round-task_aware-0"].series
    assert [point.x for point in first.points] == [1, 2, 3, 4, 5, 6]
    assert [point.x for point in second.points] == [4, 5, 6]
    page = (tmp_path / "a" / "report.html").read_text(encoding="utf-8")
    assert "Training loss by round" in page
    assert "Accuracy on each task by round" in page


def test_points_of_events() -> None:
    events = [
        {"event": "round", "loss": 2.0, "accuracies": {"routed": [0.5]}},
        {"event": "round"},
        {"event": "task", "accuracy": {"routed": [0.7, None]}},
        {"event": "round", "loss": 1.0, "accuracies": {"routed": [0.6, 0.2]}},
    ]
    assert losses(events) == [(1.0, 2.0), (3.0, 1.0)]
    assert accuracies(events, "routed") == [(1.0, [0.5]), (2.0, [0.7]), (3.0, [0.6, 0.2])]
    assert accuracies(events[1:3], "routed") == []


def test_trackers_get_them() -> None:
    event = {"event": "round", "loss": 2.0, "bytes": {"up": 1, "down": 1},
             "accuracy": {"routed": 0.2}, "accuracies": {"routed": [0.6, 0.2]}}  # fmt: skip
    _, values = EventMetrics().extract(event)
    assert (values["loss"], values["routed/task_1"], values["routed/current"]) == (2.0, 0.6, 0.2)
