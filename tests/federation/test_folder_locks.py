"""One server and one node per folder: a second one is turned away before it can do harm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perdure.cli.main import main
from perdure.config import parse
from perdure.core.errors import InUse, RunError
from perdure.federation import apps
from perdure.federation.admin import processes
from perdure.federation.admin.folders import ServerFolder, create_federation, only_process
from perdure.federation.admin.processes import free_port
from perdure.federation.admin.submission import Submission, create_submission
from perdure.runs.directory import FileLock

HOLD = """
import sys
from pathlib import Path
from perdure.federation.admin.folders import only_process
with only_process(Path(sys.argv[1]), "server"):
    print("held", flush=True)
    sys.stdin.read()
"""
CONFIG = {"stream": {"tasks": 1}, "train": {"rounds": 1}, "data": {"limit": 40}}


@pytest.fixture
def held(tmp_path, request):
    """A folder of a federation in which another process runs."""
    create_federation(tmp_path / "home", 1, "localhost", free_port())
    folder = tmp_path / "home" / request.param
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    yield folder
    process.stdin.close()
    process.wait()


@pytest.mark.parametrize("held", ["server"], indirect=True)
def test_a_second_server_is_turned_away_before_anything_else(held, monkeypatch, capsys):
    submission = Submission(held / "submissions" / "run")
    submission.path.mkdir(parents=True)
    submission.record_outcome("stopped", "nodes are missing")
    before = sorted(held.rglob("*"))
    monkeypatch.setattr(processes, "start_process", lambda *_: pytest.fail("it was started"))
    assert main(["federation", "server", str(held)]) == 2
    assert "a server runs in this folder already (process" in capsys.readouterr().err
    assert sorted(held.rglob("*")) == before
    assert submission.outcome == {"state": "stopped", "reason": "nodes are missing"}


@pytest.mark.parametrize("held", ["node-0"], indirect=True)
def test_a_second_node_is_turned_away(held, capsys):
    assert main(["federation", "node", str(held)]) == 2
    captured = capsys.readouterr()
    assert "a node runs in this folder already (process" in captured.err
    assert captured.out == ""


def test_the_folder_is_free_after_the_process(tmp_path):
    with only_process(tmp_path, "server"), pytest.raises(InUse), only_process(tmp_path, "server"):
        pass
    with only_process(tmp_path, "server"):
        pass


def submitted(tmp_path):
    config = parse({**CONFIG, "engine": {"kind": "flower"}})
    submission = create_submission(ServerFolder(tmp_path, 1, 1), config, tmp_path / "out", None)
    text = (submission.path / "perdure-run" / "pyproject.toml").read_text()
    import tomllib

    return submission, tomllib.loads(text)["tool"]["flwr"]["app"]["config"]


def in_use(out: Path) -> FileLock:
    out.mkdir()
    lock = FileLock(out / ".lock")
    lock.acquire()
    return lock


def test_a_run_that_another_process_trains_is_not_marked_as_refused(tmp_path, monkeypatch):
    submission, values = submitted(tmp_path)
    lock = in_use(tmp_path / "out")
    monkeypatch.setattr(apps, "IN_USE_SECONDS", 0.0)
    with pytest.raises(InUse):
        apps.run_submission(values, lambda timeout: None)
    assert submission.outcome is None
    lock.release()


def test_the_loop_of_a_dead_server_is_waited_for(tmp_path, monkeypatch):
    submission, values = submitted(tmp_path)
    lock = in_use(tmp_path / "out")
    monkeypatch.setattr(apps.time, "sleep", lambda seconds: lock.release())
    with pytest.raises(RunError, match="flower requires a federation"):
        apps.run_submission(values, lambda timeout: None)  # it begins, and has no way to nodes
    assert submission.outcome["state"] == "stopped"
