"""A node that comes back before Flower has noticed that it was gone tries again."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from perdure.engines.flower import nodes
from perdure.engines.flower.processes import Child
from perdure.errors import RunError


def test_a_node_that_is_turned_away_tries_again(tmp_path, monkeypatch):
    lines = ["[code: 2004] Failed to activate SuperNode.", "the key is not known"]
    log = tmp_path / "log" / "node.log"
    log.parent.mkdir()
    pauses = []

    def start_node(folder, data, threads):
        with log.open("a") as out:
            command = [sys.executable, "-c", f"print({lines.pop(0)!r})"]
            return Child("node-0", log, subprocess.Popen(command, stdout=out))

    monkeypatch.setattr(nodes, "start_node", start_node)
    monkeypatch.setattr(nodes.time, "sleep", pauses.append)
    with pytest.raises(RunError, match=r"node-0 has ended .*the key is not known"):
        nodes.take_part(SimpleNamespace(path=tmp_path))
    assert pauses == [nodes._PAUSE]
    assert lines == []
