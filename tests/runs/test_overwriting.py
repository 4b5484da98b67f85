"""overwrite=True deletes a run, and nothing that is not of a run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import perdure
from perdure.cli.main import main
from perdure.core.errors import UserError
from perdure.runs.directory import RunDirectory

TINY: dict[str, Any] = {
    "data": {"limit": 60, "test_limit": 30},
    "stream": {"tasks": 1},
    "clients": {"count": 2},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 1, "max_steps": 1},
    "engine": {"kind": "serial"},  # auto chooses by measured times
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    perdure.run({**TINY, "seed": 1}, out=tmp_path / "run")
    return tmp_path / "run"


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def names(folder: Path) -> set[str]:
    """Return the files without the hashes in their names, which depend on times."""
    return {re.sub(r"-[0-9a-f]{32}", "", name) for name in content(folder)}


def refused(out: Path, match: str, **options: Any) -> None:
    before = content(out)
    with pytest.raises(UserError, match=match):
        perdure.run(TINY | options.pop("config", {}), out=out, overwrite=True, **options)
    assert content(out) == before


def test_another_run_takes_its_place(out: Path, tmp_path: Path) -> None:
    (out / "notes.txt").write_text("mine")
    (out / "method").mkdir(exist_ok=True)
    (out / "method" / "old.py").write_text("")
    again = perdure.run(TINY, out=out, overwrite=True)
    fresh = perdure.run(TINY, out=tmp_path / "fresh")
    assert again.values["model_sha256"] == fresh.values["model_sha256"]
    assert RunDirectory.open(out).config().seed == 0
    assert names(out) == names(tmp_path / "fresh") | {"notes.txt"}
    assert (out / "notes.txt").read_text() == "mine"


def test_a_new_directory_needs_nothing_deleted(tmp_path: Path) -> None:
    assert perdure.run(TINY, out=tmp_path / "new", overwrite=True).path == tmp_path / "new"


def test_links_are_not_followed(out: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "photo.jpg").write_bytes(b"1")
    shutil.rmtree(out / "model")
    (out / "model").symlink_to(precious)
    (out / "checkpoints" / "link").symlink_to(precious)
    (out / "result.json").unlink()
    (out / "result.json").symlink_to(precious / "photo.jpg")
    perdure.run(TINY, out=out, overwrite=True)
    assert (precious / "photo.jpg").read_bytes() == b"1"
    assert list(precious.iterdir()) == [precious / "photo.jpg"]
    assert not (out / "model").is_symlink()


def test_a_link_to_a_run_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(out)
    refused(tmp_path / "link", "got .*link, which is a link")
    assert (out / "result.json").is_file()


@pytest.mark.parametrize("name", ["config.yaml", ".lock"])
def test_a_link_in_place_of_a_file_that_tells_a_run_is_refused(out: Path, name: str) -> None:
    other = out.parent / "other"
    (out / name).rename(other)
    before = other.read_bytes()
    (out / name).symlink_to(other)
    refused(out, f"whose {re.escape(name)} is not a file of a run")
    assert other.read_bytes() == before


def test_a_link_as_lock_is_never_emptied(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot be written"):
        perdure.run(TINY, out=tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "kept"


@pytest.mark.parametrize("text", ["seed: 0\n", "name: my-project\n", "["])
def test_a_folder_with_a_config_that_is_not_of_a_run_is_refused(tmp_path: Path, text: str) -> None:
    project = tmp_path / "project"
    (project / "model").mkdir(parents=True)
    (project / "model" / "mine.py").write_text("x = 1")
    (project / "config.yaml").write_text(text)
    refused(project, "overwrite=True: must be given for a run directory")
    (project / ".lock").write_text("")
    if text != "seed: 0\n":
        refused(project, r"whose config\.yaml is not that of a run")


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.py").write_text("x = 1")
    refused(tmp_path, "already contains model, use another out")


def test_a_run_that_is_in_use_is_refused(out: Path) -> None:
    with RunDirectory.reopen(out):
        refused(out, r"out='.*run': in use by process \d+")


def test_a_run_stays_if_the_next_is_not_valid(out: Path) -> None:
    refused(out, "clients.count", config={"clients": {"count": 0}})
    refused(out, "overwrite: must be given without resume", resume=True)
    refused(out, "must be False with engine flower", config={"engine": {"kind": "flower"}})
    (out / "federation").mkdir()
    refused(out, "which holds a federation")


def test_the_command_has_its_own_words(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(out / "config.yaml"), "--out", str(out), "--quiet"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "already contains a run, use --resume, --overwrite or another --out" in " ".join(
        said.split()
    )
    assert main([*words, "--set", "seed=7", "--overwrite"]) == 0
    assert RunDirectory.open(out).config().seed == 7
    with pytest.raises(UserError, match=r"use resume=True, overwrite=True or another out"):
        perdure.run(TINY, out=out)
