"""Whatever nodes and server do, the run ends with a model, and the log names failures."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess

import pytest

from conftest import Process, flower_processes, wait_for
from perdure.federation.admin.keys import write_authority, write_node_key
from perdure.runs.run import run

BASE = {
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"rounds": 3, "batch_size": 64},
    "data": {"limit": 240},
    "device": "cpu",
}


def copy_methods(federation):
    """Copy the custom method beside the config."""
    source = os.path.join(os.path.dirname(__file__), "misbehaving.py")
    shutil.copy(source, federation.home / "misbehaving.py")


def test_wrong_uploads_of_every_kind_are_left_out(federation):
    copy_methods(federation)
    method = {"kind": "misbehaving.Misbehaving"}
    config = {**BASE, "method": method, "train": {"rounds": 6, "batch_size": 64}}
    values = federation.run(config, "misbehaving")
    assert values["rejected_updates"] == [{"task": 0, "round": 0, "client": 2}]
    reasons = {failure["round"]: failure["reason"] for failure in values["failures"]}
    assert {failure["client"] for failure in values["failures"]} == {2}
    assert "must be torch.float32" in reasons[1]
    assert "at most" in reasons[2] or "not in the model" in reasons[2]
    assert "cannot be decoded" in reasons[3]
    assert "this client breaks down" in reasons[4]
    assert set(reasons) == {1, 2, 3, 4}
    assert values["client_updates"] == 18 - 5
    assert math.isfinite(values["metrics"]["task_agnostic"]["ACC"])
    output = federation.server_log()
    for text in ("client 2 is left out", "update of client 2 is not finite"):
        assert text in output


def test_a_late_reply_is_left_out(federation, tmp_path):
    copy_methods(federation)
    method = {"kind": "misbehaving.Slow", "flag": str(tmp_path / "late"), "seconds": 120.0}
    config = {**BASE, "method": method, "engine": {"kind": "flower", "timeout": 90}}
    values = federation.run(config, "late")
    assert {"task": 0, "round": 1, "client": 1, "reason": "no answer within 90 s"} in (
        values["failures"]
    )
    assert values["rounds"] == 3


def test_a_node_killed_during_a_round_returns(own_federation, tmp_path):
    own_federation.start()
    copy_methods(own_federation)
    flag = tmp_path / "begun"
    method = {"kind": "misbehaving.Slow", "flag": str(flag), "seconds": 3600.0}
    out = own_federation.submit({**BASE, "method": method}, "killed")
    wait_for(flag.exists, "the round in which the node is killed", own_federation.server)
    own_federation.kill_node(1)
    own_federation.start_node(1)
    values = own_federation.result(out)
    failures = [(failure["client"], failure["round"]) for failure in values["failures"]]
    assert (1, 1) in failures
    assert {client for client, _ in failures} == {1}  # it may miss the next round, too
    assert values["rounds"] == 3
    assert "client 1 is left out: node-1" in own_federation.server_log()
    again = own_federation.run({**BASE, "train": {"rounds": 1}}, "again")
    assert again["failures"] == []
    assert again["client_updates"] == 3


def test_a_server_killed_during_a_task_resumes_its_run(own_federation, tmp_path):
    own_federation.start()
    config = {**BASE, "method": {"kind": "er"}, "stream": {"kind": "split", "tasks": 2}}
    out = own_federation.submit(config, "restart")
    events = out / "events.jsonl"
    done = lambda: events.is_file() and events.read_bytes().count(b'"event": "round"') >= 4  # noqa: E731
    wait_for(done, "the middle of the second task", own_federation.server)
    own_federation.kill_server()
    assert not (out / "result.json").exists()
    own_federation.start_server()
    values = own_federation.result(out)
    wanted = run({**config, "engine": {"kind": "serial"}}).values
    assert values["model_sha256"] == wanted["model_sha256"]
    assert values["matrix"] == wanted["matrix"]


def test_unregistered_nodes_and_uncertified_servers_are_refused(federation, tmp_path):
    stranger = tmp_path / "stranger"
    shutil.copytree(federation.home / "node-0", stranger, ignore=shutil.ignore_patterns("log"))
    (stranger / "node.key").unlink()
    write_node_key(stranger / "node.key", tmp_path / "unregistered.pub")
    output = refused(stranger, tmp_path)
    assert "SuperNode ID" not in output
    fooled = tmp_path / "fooled"
    shutil.copytree(federation.home / "node-0", fooled, ignore=shutil.ignore_patterns("log"))
    other = tmp_path / "authority"
    other.mkdir()
    write_authority(other)
    shutil.copy(other / "ca.pem", fooled / "ca.pem")
    output = refused(fooled, tmp_path)
    assert "SuperNode ID" not in output
    assert "certificate" in output.lower() or "retrying" in output.lower()


def refused(folder, tmp_path) -> str:
    """Start a node that is refused, and return its log."""
    process = Process(["federation", "node", "."], folder, tmp_path / f"{folder.name}.out")
    log = folder / "log" / "node.log"

    def over() -> bool:
        text = log.read_text(errors="replace") if log.is_file() else ""
        ended = process.process.poll() is not None
        return ended or "retrying" in text.lower() or "refuses this node" in process.output()

    wait_for(over, "the refusal")
    process.stop()
    return log.read_text(errors="replace")


def test_ctrl_c_ends_a_trial_and_all_its_processes(tmp_path):
    from conftest import PERDURE

    path = tmp_path / "trial.yaml"
    path.write_text(
        "clients: {count: 1}\nstream: {tasks: 1}\ndata: {limit: 100}\ntrain: {rounds: 4}\n"
    )
    out = tmp_path / "out"
    process = subprocess.Popen(
        [PERDURE, "run", str(path), "--engine", "flower", "--out", str(out)],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    wait_for((out / "events.jsonl").is_file, "the first round")
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "resume with" in output
    wait_for(lambda: not flower_processes(out), "the end of all processes")
    resumed = subprocess.run(
        [PERDURE, "run", str(path), "--engine", "flower", "--out", str(out), "--resume"],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    if resumed.returncode:
        pytest.fail(resumed.stderr)
