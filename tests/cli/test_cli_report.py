"""perdure report: what it writes, and what a mistake looks like."""

from __future__ import annotations

import json
from pathlib import Path

from shells import Shell, one_sentence

SENT = {"clients": 1, "up": {"mean": 1, "max": 1}, "down": {"mean": 1, "max": 1}}
RESULT = {
    "method": "fedavg", "seed": 0, "tasks": 2,
    "matrix": {"task_agnostic": [[0.9, None], [0.5, 0.8]], "task_aware": None, "routed": None},
    "metrics": {"task_agnostic": {"ACC": 0.65}, "task_aware": None, "routed": None},
    "measure": "accuracy", "draws": "those of a seed",
    "bytes": {
        "up": 1, "down": 1, "by_field": {}, "types": {}, "kept": None,
        "by_task": [{"up": 1, "down": 1, "by_field": {}, "per_client": SENT}] * 2,
    },
    "seconds": {"total": 1.0, "by_task": [0.5, 0.5]},
}  # fmt: skip


def a_run(name: str, **changes: object) -> Path:
    path = Path(name)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("format: 1\nstream: {tasks: 2}\n")
    (path / "result.json").write_text(json.dumps({**RESULT, **changes}))
    return path


def test_a_page_and_figures_of_nested_runs(shell: Shell) -> None:
    a_run("all/deep/one")
    said = shell("report", "all", "--html", "page.html", "--figures", "pictures")
    assert said.code == 0
    assert "page.html" in said.out
    assert "fedavg on permuted digits" in Path("page.html").read_text(encoding="utf-8")
    assert Path("pictures/matrix-task_agnostic.png").is_file()
    assert Path("pictures/matrix-task_agnostic.svg").is_file()


def test_what_cannot_be_used_is_named_and_left_out(shell: Shell) -> None:
    a_run("good")
    (a_run("half") / "result.json").unlink()
    said = shell("report", "good", "half", "--html", "page.html")
    assert said.code == 0
    assert "half is skipped: has no result.json, the run is not finished" in said.err
    assert "half" in Path("page.html").read_text(encoding="utf-8")


def test_mistakes_are_one_sentence_and_leave_nothing(shell: Shell) -> None:
    a_run("good")
    Path("empty").mkdir()
    before = shell.files()
    one_sentence(shell("report", "no-such", "--html", "x.html"), "no-such", "no such directory")
    one_sentence(shell("report", "good", "--html", "no/x.html"), "no/x.html", "does not exist")
    said = shell("report", "empty", "--html", "x.html")
    assert said.code == 2
    assert "no finished run" in said.err.splitlines()[-1]
    assert shell.files() == before
