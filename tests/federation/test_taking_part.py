"""A node retries if it restarts before Flower notices that it was gone, or if its line is cut."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from perdure.core.errors import RunError
from perdure.federation.admin import processes
from perdure.federation.admin.processes import Child

GAVE_UP = "ERROR: SSL/TLS handshake error detected."
REFUSED = "[code: 2004] Failed to activate SuperNode."


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(processes, "POLL_SECONDS", 0.1)


def run_node(lines, tmp_path, monkeypatch):
    """Run a node whose processes print these lines; return its pauses and the error."""
    log = tmp_path / "log" / "node.log"
    log.parent.mkdir()
    pauses = []

    def start_node(folder, data, threads):
        with log.open("a") as out:
            log_start = out.tell()
            text = lines.pop(0)
            hangs = "; import time; time.sleep(3600)" if GAVE_UP in text else ""
            command = [sys.executable, "-c", f"print({text!r}, flush=True){hangs}"]
            return Child("node-0", log, subprocess.Popen(command, stdout=out), log_start)

    monkeypatch.setattr(processes, "start_node", start_node)
    monkeypatch.setattr(processes, "pause", pauses.append)
    with pytest.raises(RunError) as error:
        processes.run_node(SimpleNamespace(path=tmp_path, number=0, server="localhost:1"))
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


def test_a_node_that_lost_its_line_is_started_again_until_it_has_one(tmp_path, monkeypatch):
    """Flower's process gives up and stays, without a connection and without an end."""
    monkeypatch.setattr(processes, "ATTEMPTS", 2)  # they count refusals alone
    lines = [GAVE_UP] * 3 + ["the disk is full"]
    pauses, error_text = run_node(lines, tmp_path, monkeypatch)
    assert "the disk is full" in error_text
    assert pauses == [15.0] * 3


def test_a_node_does_not_retry_with_a_server_that_is_not_certified(tmp_path, monkeypatch):
    text = f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed\n{GAVE_UP}"
    pauses, error_text = run_node([text], tmp_path, monkeypatch)
    assert error_text == "the server at localhost:1 is not certified by ca.pem"
    assert pauses == []
