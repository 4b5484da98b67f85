"""A node that restarts before Flower notices that it was gone retries."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from perdure.core.errors import RunError
from perdure.flower import node_process
from perdure.flower.processes import Child

REFUSED = "[code: 2004] Failed to activate SuperNode."


def run_node(lines, tmp_path, monkeypatch):
    """Run a node whose processes print these lines; return its pauses and the error."""
    log = tmp_path / "log" / "node.log"
    log.parent.mkdir()
    pauses = []

    def start_node(folder, data, threads):
        with log.open("a") as out:
            log_start = out.tell()
            command = [sys.executable, "-c", f"print({lines.pop(0)!r})"]
            return Child("node-0", log, subprocess.Popen(command, stdout=out), log_start)

    monkeypatch.setattr(node_process, "start_node", start_node)
    monkeypatch.setattr(node_process.time, "sleep", pauses.append)
    with pytest.raises(RunError) as error:
        node_process.run_node(SimpleNamespace(path=tmp_path, number=0))
    return pauses, str(error.value)


def test_a_refused_node_retries(tmp_path, monkeypatch):
    lines = [REFUSED, "the key is not known"]
    pauses, error_text = run_node(lines, tmp_path, monkeypatch)
    assert "node-0 has ended" in error_text
    assert "the key is not known" in error_text
    assert pauses == [15.0]
    assert lines == []


def test_a_refused_node_gives_up_after_three_minutes(tmp_path, monkeypatch):
    lines = [REFUSED] * 13
    pauses, error_text = run_node(lines, tmp_path, monkeypatch)
    assert error_text.startswith("the server refuses node-0: its key is not registered, or")
    assert sum(pauses) == 165.0
    assert lines == [REFUSED]
