"""A second server or node in a folder is turned away, and the run of the first continues."""

from __future__ import annotations

import json

from conftest import Process

CONFIG = {
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 3, "batch_size": 64},
    "data": {"limit": 120},
    "device": "cpu",
}


def test_a_second_server_and_a_second_node_are_turned_away(federation, tmp_path):
    out = federation.submit(CONFIG, "live")
    for folder, owner in (("server", "server"), ("node-1", "node")):
        second = Process(["federation", owner, folder], federation.home, tmp_path / owner)
        assert second.process.wait(120) == 2
        assert f"a {owner} runs in this folder already (process" in " ".join(
            second.output().split()
        )
    values = federation.result(out)
    assert values["failures"] == []
    assert values["rounds"] == 3
    outcomes = (federation.home / "server" / "submissions").glob("*/outcome.json")
    assert {json.loads(path.read_text())["state"] for path in outcomes} <= {"done"}
