"""A submitted app holds the config of `perdure run`: nothing is left to server and nodes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from perdure.config import parse
from perdure.core.errors import RunError
from perdure.federation.admin import submission as submissions
from perdure.federation.admin.folders import ServerFolder
from perdure.federation.admin.submission import (
    Submission,
    create_submission,
    read_run,
    start_submission,
)
from perdure.training.settings import with_method_defaults


@pytest.mark.parametrize("kind", ["fedavg", "special", "er", "fot"])
def test_server_and_nodes_read_what_a_run_would_choose(kind: str, tmp_path: Path) -> None:
    """An incomplete config would leave choices to each of them."""
    config = parse({"stream": {"kind": "split", "tasks": 2}, "method": {"kind": kind}})
    submission = create_submission(ServerFolder(tmp_path, 1, 1), config, tmp_path / "out", None)
    project = tomllib.loads((submission.path / "perdure-run/pyproject.toml").read_text())
    _, sent, _ = read_run(project["tool"]["flwr"]["app"]["config"])
    assert sent == with_method_defaults(config)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ('loading {"success": false, "error-message": "No\\n\\nreply. "}', "flwr run: No reply."),
        ("a crash", "flwr run: a crash"),
        ('{"success": true, "half', 'flwr run: {"success": true, "half'),
    ],
)
def test_what_flower_says_of_a_failure_is_one_sentence(
    output: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submissions, "call_flwr", lambda *_: [(False, output)])
    with pytest.raises(RunError) as caught:
        start_submission(ServerFolder(tmp_path, 1, 1), Submission(tmp_path))
    assert str(caught.value) == sentence
