"""Ctrl-C on a real process: a clean stop, the command that resumes, and the same result."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shells import Shell

COMMAND = [sys.executable, "-m", "perdure.cli.main"]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to a single process")


def _start(*words: str) -> subprocess.Popen[str]:
    # a test session in the background ignores SIGINT, and its children would inherit that
    return subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _wait_for_lines(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    while not path.is_file() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def _outcome(folder: str) -> tuple[object, ...]:
    values = json.loads(Path(folder, "result.json").read_text())
    return values["model_sha256"], values["matrix"], values["bytes"], values["rounds"]


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_the_command_it_names_goes_on(shell: Shell) -> None:
    rounds = "train.rounds=60"
    file = str(shell.config(name="my config.yaml"))
    process = _start("run", file, "--set", rounds, "--out", "my run", "--quiet")
    _wait_for_lines(Path("my run/events.jsonl"), 5, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out == ""
    assert len(err.splitlines()) == 1
    assert not Path("my run/result.json").exists()
    words = shlex.split(err.partition("resume with: ")[2])
    assert words[0] == "perdure"
    assert shell(*words[1:]).code == 0
    assert shell("run", file, "--set", rounds, "--out", "whole").code == 0
    assert _outcome("my run") == _outcome("whole")


def test_a_process_says_a_mistake_in_one_sentence(shell: Shell) -> None:
    file = str(shell.config({"stream": {"tasks": 0}}))
    process = _start("run", file)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err == "perdure: error: stream.tasks: must be at least 1, got 0\n"
    assert shell.files() == {file}


def test_ctrl_c_before_anything_was_written(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perdure.cli.run.run_config", interrupt)
    file = shell.config()
    said = shell("run", file)
    assert (said.code, said.err) == (130, "perdure: stopped: nothing was written\n")
    assert shell.files() == {str(file)}
