"""What perdure serve refuses before it listens."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

import perdure
from perdure.cli.main import main

pytest.importorskip("uvicorn")
TINY = {"data": {"limit": 60}, "stream": {"tasks": 1}, "train": {"rounds": 1}}


def test_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path)]) == 2
    assert "contains no trained model" in capsys.readouterr().err


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    perdure.run(TINY, out=tmp_path / "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(tmp_path / "run"), "--port", str(port)]) == 2
    (line,) = [e for e in capsys.readouterr().err.splitlines() if "INFO" not in e]
    assert f"--port {port}: cannot be used (Address already in use)" in line


def test_code_of_a_run_needs_trust(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "own_method.py").write_text(
        "from dataclasses import dataclass\nimport perdure\n\n"
        "@dataclass(frozen=True)\nclass Own(perdure.Method):\n    pass\n"
    )
    sys.path.insert(0, str(folder))
    try:
        perdure.run({**TINY, "method": {"kind": "own_method.Own"}}, out=tmp_path / "run")
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("own_method")
    assert main(["serve", str(tmp_path / "run")]) == 2
    assert "trust" in capsys.readouterr().err


def test_without_its_packages(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(tmp_path)]) == 2
    assert "requires pip install 'perdure[serve]'" in capsys.readouterr().err
