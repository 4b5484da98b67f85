"""perdure compare with real processes: it resumes, names what fails, and leaves nobody behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shells import Shell, one_sentence

from perdure.runs.directory import FileLock, LockHeld

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "perdure.cli.main"]
BROKEN = """
from perdure import Method, RunError, Train

class Broken(Method):
    def exchanges(self, context):
        return [Train(adjust=self.adjust)]

    def adjust(self, server, change, uploads, context):
        raise RunError("this method fails")
"""


def test_a_failing_run_is_named_the_others_go_on_and_nothing_is_repeated(shell: Shell) -> None:
    Path("broken.py").write_text(BROKEN)
    none = ("--references", "none")
    words = ("compare", shell.config(), "--out", "c", "--seeds", "4", *none, "--methods")
    said = shell(*words, "fedavg,broken.Broken")
    assert said.code == 1
    assert "broken.Broken/seed-4 (this method fails)" in said.err
    assert "resume with: perdure compare tiny.yaml --methods fedavg,broken.Broken" in said.err
    assert "[1 of 2] fedavg/seed-4: task_agnostic ACC" in said.out
    result = Path("c/fedavg/seed-4/result.json")
    when, values = result.stat().st_mtime_ns, json.loads(result.read_text())
    said = shell(*words, "fedavg")
    assert said.code == 0
    assert "1 runs, 1 already finished" in said.out
    assert result.stat().st_mtime_ns == when
    summary = json.loads(Path("c/comparison.json").read_text())
    cell = summary["table"]["cells"]["fedavg"]["metrics.task_agnostic.ACC"]
    assert cell["mean"] == values["metrics"]["task_agnostic"]["ACC"]
    assert cell["std"] is None
    assert {"table.csv", "table.md", "table-task_agnostic.tex", "table-cost.tex"} <= {
        path.name for path in Path("c").iterdir()
    }
    one_sentence(
        shell(*words, "fedavg", "--set", "train.lr=7"), "train.lr: must be 0.1 as in", "got 7"
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--methods", "fedavgg"], ["method.kind", "fedavgg"]),
        (["--methods", "fot:threshold=7"], ["threshold", "7"]),
        (["--methods", "fedavg", "--seeds", "x"], ["--seeds", "x"]),
        (["--methods", "fedavg", "--references", "x"], ["--references: must be closed-form", "x"]),
        (["--methods", "fedavg", "--sweep", "method.mu=1"], ["--sweep", "method.mu"]),
        (["--methods", "fedavg", "--sweep", "train.lr=-1"], ["train.lr", "-1"]),
        (["--methods", "fedavg", "--set", "train.lr"], ["--set: must be key=value", "train.lr"]),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    shell: Shell, words: list[str], parts: list[str]
) -> None:
    file = shell.config()
    one_sentence(shell("compare", file, "--out", "c", *words), *parts)
    assert shell.files() == {str(file)}


@contextlib.contextmanager
def _comparing(shell: Shell) -> Iterator[subprocess.Popen[str]]:
    file = shell.config({"train": {"rounds": 5000}})
    process = subprocess.Popen(
        [
            *COMMAND,
            "compare",
            str(file),
            "--methods",
            "fedavg",
            "--seeds",
            "0",
            "--references",
            "none",
            "--out",
            "c",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not Path("c/fedavg/seed-0/events.jsonl").is_file():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


def _is_free(folder: str) -> bool:
    lock = FileLock(Path(folder, ".lock"))
    try:
        lock.acquire()
    except LockHeld:
        return False
    lock.release()
    return True


@pytest.mark.skipif(os.name == "nt", reason="sends signals to a single process")
def test_ctrl_c_stops_the_runs_and_says_how_to_go_on(shell: Shell) -> None:
    with _comparing(shell) as process:
        assert not _is_free("c/fedavg/seed-0")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130
        assert "resume with: perdure compare tiny.yaml --methods fedavg --seeds 0" in err
        assert len(err.splitlines()) == 1
        assert _is_free("c/fedavg/seed-0")


@pytest.mark.skipif(os.name == "nt", reason="sends signals to a single process")
def test_a_killed_comparison_leaves_no_run_behind(shell: Shell) -> None:
    with _comparing(shell) as process:
        process.kill()
        process.wait()
        for _ in range(1200):
            if _is_free("c/fedavg/seed-0"):
                return
            time.sleep(0.05)
        pytest.fail("the run continues without its comparison")
