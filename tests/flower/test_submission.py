"""A submitted app holds the config of `perdure run`: nothing is left to server and nodes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from perdure.config import parse
from perdure.flower.folders import ServerFolder
from perdure.flower.submission import create_submission, read_run
from perdure.training.open_settings import with_method_defaults


@pytest.mark.parametrize("kind", ["fedavg", "special", "er", "fot"])
def test_server_and_nodes_read_what_a_run_would_choose(kind: str, tmp_path: Path) -> None:
    """Of an incomplete config they would read the choices of 0.3, as of an old run directory."""
    config = parse({"stream": {"kind": "split", "tasks": 2}, "method": {"kind": kind}})
    submission = create_submission(ServerFolder(tmp_path, 1, 1), config, tmp_path / "out", None)
    project = tomllib.loads((submission.path / "perdure-run/pyproject.toml").read_text())
    _, sent, _ = read_run(project["tool"]["flwr"]["app"]["config"])
    assert sent == with_method_defaults(config)
