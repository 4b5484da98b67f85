"""perdure watch, on directories as other processes leave them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from shells import Shell, one_sentence

from perdure.cli import watch as command
from perdure.runs.progress import RunProgress


@pytest.fixture
def finished(shell: Shell) -> Path:
    assert shell("run", shell.config(), "--out", "runs/one", "--quiet").code == 0
    return Path("runs/one")


def test_a_finished_run_is_printed_once(shell: Shell, finished: Path) -> None:
    result = json.loads((finished / "result.json").read_text())
    said = shell("watch", finished)
    assert said.code == 0
    (line,) = said.out.splitlines()
    assert line.startswith("one: task 2/2, round 4/4, accuracy task_agnostic")
    assert f"{result['metrics']['task_agnostic']['ACC']:.3f}" in line
    assert line.endswith("left ended")


def test_a_half_finished_run_beside_a_finished_one(shell: Shell, finished: Path) -> None:
    half = Path("runs/two")
    half.mkdir()
    (half / "config.yaml").write_text((finished / "config.yaml").read_text())
    lines = (finished / "events.jsonl").read_text().splitlines(keepends=True)
    (half / "events.jsonl").write_text(lines[0] + lines[1][:7])
    said = shell("watch", "runs", "--once")
    assert said.code == 0
    rows = [
        line.split() for line in said.out.splitlines() if line.split()[:1] in (["one"], ["two"])
    ]
    assert [row[:3] for row in rows] == [["one", "2/2", "4/4"], ["two", "1/2", "1/4"]]


def test_it_ends_when_the_last_result_is_there(shell: Shell, finished: Path) -> None:
    result = (finished / "result.json").read_text()
    (finished / "result.json").unlink()

    def end() -> None:
        time.sleep(0.3)
        (finished / "result.json").write_text(result)

    writer = threading.Thread(target=end)
    writer.start()
    said = shell("watch", "runs", "--every", "0.05")
    writer.join()
    assert said.code == 0
    assert said.out.splitlines()[-1].endswith("left ended")


def test_runs_of_a_comparison_are_awaited(shell: Shell) -> None:
    Path("c").mkdir()
    plan = {"runs": [{"label": "fedavg", "seed": 0, "path": "fedavg/seed-0"}]}
    Path("c/comparison.json").write_text(json.dumps(plan))
    said = shell("watch", "c", "--once")
    assert said.code == 0
    assert "fedavg/seed-0" in said.out
    assert "waiting" in said.out


def test_nothing_to_watch_is_a_mistake(shell: Shell) -> None:
    one_sentence(shell("watch", "nowhere"), "nowhere", "no such directory")
    Path("empty").mkdir()
    one_sentence(shell("watch", "empty"), "empty", "contains no run directory")


def test_times_for_people() -> None:
    assert [command.duration(s) for s in (None, 0.4, 61, 3723)] == ["-", "0:00", "1:01", "1:02:03"]
    row = command.cells(RunProgress(started=True, rounds=3, seconds=5))
    assert row[:3] == ["1/?", "3/?", "-"]
