"""The progress of a run, read while another process writes it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from perdure.config import dump_saved, parse
from perdure.runs.progress import RunFollower

CONFIG = parse({"stream": {"tasks": 2}, "train": {"rounds": [1, 3]}})


def _round(task: int, up: int) -> dict[str, Any]:
    return {"event": "round", "task": task, "bytes": {"up": up, "down": 2 * up}}


def _end(task: int, up: int, row: list[float | None]) -> dict[str, Any]:
    accuracy = {"task_agnostic": row, "task_aware": row, "routed": [None, None]}
    return {
        "event": "task",
        "task": task,
        "bytes": {"up": up, "down": 2 * up},
        "accuracy": accuracy,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(dump_saved(CONFIG))
    return tmp_path


def _add(folder: Path, *events: dict[str, Any], torn: str = "") -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events) + torn)


def test_a_run_without_a_directory_has_not_started(tmp_path: Path) -> None:
    assert not RunFollower(tmp_path).poll().started


def test_progress_has_rounds_tasks_accuracy_and_bytes(folder: Path) -> None:
    follower = RunFollower(folder)
    assert follower.poll().total_rounds == 4
    _add(folder, _round(0, 5), _end(0, 7, [0.8, None]), _round(1, 10))
    progress = follower.poll()
    assert (progress.task, progress.tasks, progress.rounds) == (1, 2, 2)
    assert (progress.accuracy, progress.mode) == (0.8, "task_agnostic")
    assert (progress.bytes_up, progress.bytes_down) == (17, 34)
    _add(folder, _round(1, 20), _round(1, 30), _end(1, 31, [0.4, 0.8]))
    (folder / "result.json").write_text('{"seconds": {"total": 12.5}}')
    progress = follower.poll()
    assert progress.finished
    assert progress.seconds == 12.5
    assert progress.accuracy == pytest.approx(0.6)
    assert (progress.rounds, progress.bytes_up, progress.seconds_left) == (4, 38, 0.0)


def test_an_incomplete_line_is_read_when_it_is_complete(folder: Path) -> None:
    follower = RunFollower(folder)
    line = json.dumps(_round(0, 5))
    _add(folder, torn=line[:9])
    assert follower.poll().rounds == 0
    _add(folder, torn=line[9:] + "\n")
    assert follower.poll().rounds == 1


def test_a_run_resumed_at_an_earlier_checkpoint_is_read_from_its_start(folder: Path) -> None:
    follower = RunFollower(folder)
    _add(folder, _round(0, 5), _end(0, 7, [0.8, None]), _round(1, 10))
    follower.poll()
    os.truncate(folder / "events.jsonl", len(json.dumps(_round(0, 5))) + 1)
    progress = follower.poll()
    assert (progress.rounds, progress.bytes_up, progress.accuracy) == (1, 5, None)


def test_the_time_left_follows_the_observed_pace(folder: Path) -> None:
    now = [100.0]
    follower = RunFollower(folder, clock=lambda: now[0])
    _add(folder, _round(0, 5))
    follower.poll()
    now[0] = 110.0
    _add(folder, _end(0, 7, [0.8, None]), _round(1, 10))
    assert follower.poll().seconds_left == pytest.approx(20.0)  # ten seconds per round


def test_a_config_of_another_version_does_not_hide_the_rounds(folder: Path) -> None:
    (folder / "config.yaml").write_text("color: red")
    _add(folder, _round(0, 5), _end(0, 7, [0.8, None]))
    progress = RunFollower(folder).poll()
    assert (progress.rounds, progress.tasks, progress.accuracy) == (1, 2, 0.8)
    assert progress.total_rounds is None


def test_invalid_lines_are_skipped(folder: Path) -> None:
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'hello\n[]\n{}\n{"event": "round"}\n\xff\n')
    assert RunFollower(folder).poll().rounds == 0
