"""A node that comes back before Flower has noticed that it was gone tries again."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from perdure.core.errors import RunError
from perdure.flower import node_process as nodes
from perdure.flower.processes import Child

AWAY = "[code: 2004] Failed to activate SuperNode."


def run_node(lines, tmp_path, monkeypatch):
    """A node whose lives say these lines; the seconds that it paused."""
    log = tmp_path / "log" / "node.log"
    log.parent.mkdir()
    pauses = []

    def start_node(folder, data, threads):
        with log.open("a") as out:
            begin = out.tell()
            command = [sys.executable, "-c", f"print({lines.pop(0)!r})"]
            return Child("node-0", log, subprocess.Popen(command, stdout=out), begin)

    monkeypatch.setattr(nodes, "start_node", start_node)
    monkeypatch.setattr(nodes.time, "sleep", pauses.append)
    with pytest.raises(RunError) as error:
        nodes.run_node(SimpleNamespace(path=tmp_path, number=0))
    return pauses, str(error.value)


def test_a_node_that_is_turned_away_tries_again(tmp_path, monkeypatch):
    lines = [AWAY, "the key is not known"]
    pauses, said = run_node(lines, tmp_path, monkeypatch)
    assert "node-0 has ended" in said
    assert "the key is not known" in said
    assert pauses == [15.0]
    assert lines == []


def test_it_gives_up_after_three_minutes(tmp_path, monkeypatch):
    lines = [AWAY] * 13
    pauses, said = run_node(lines, tmp_path, monkeypatch)
    assert said.startswith("node-0 is turned away: its key is not registered there")
    assert sum(pauses) == 165.0
    assert lines == [AWAY]
