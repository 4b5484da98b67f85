"""The run directory: its lock, and files that stay readable."""

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.runs import directory as lock
from perdure.runs.directory import RunDirectory
from perdure.runs.result import peak_memory_mb
from perdure.training.settings import with_method_defaults

CONFIG = with_method_defaults(
    parse({"train": {"lr": 0.25}, "method": {"kind": "fedprox", "mu": 0.1}})
)


def content(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def refusal(path, config=CONFIG, resume=False):
    """The sentence with which a folder is refused, after making sure that nothing was written."""
    path = Path(path)
    before = content(path), path.exists()
    with pytest.raises(UserError) as caught:
        RunDirectory.create(path, config, resume)
    assert (content(path), path.exists()) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(tmp_path / "deep" / "run", CONFIG, resume=False) as run:
        yield run


def test_a_new_run_saves_its_complete_config(run):
    kept = yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8"))
    assert kept["train"]["lr"] == 0.25
    assert kept["clients"]["partition"]["kind"] == "iid"
    assert RunDirectory.open(run.path).config() == CONFIG


def test_an_empty_folder_and_one_with_other_files_can_be_used(tmp_path):
    (tmp_path / "notes.txt").touch()
    RunDirectory.create(tmp_path, CONFIG, resume=False).close()
    assert RunDirectory.open(tmp_path).config() == CONFIG


def test_create_refuses_an_existing_run(run):
    run.close()
    sentence = refusal(run.path)
    assert "use resume=True, overwrite=True or another out" in sentence
    assert str(run.path) in sentence


@pytest.mark.parametrize("name", ["result.json", "events.jsonl", "checkpoints"])
def test_files_of_a_run_are_not_overwritten(tmp_path, name):
    (tmp_path / name).mkdir()
    assert f"already contains {name}" in refusal(tmp_path)


def test_create_refuses_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine", encoding="utf-8")
    assert "must be a directory, got a file" in refusal(path)
    assert "cannot be written" in refusal(path / "below")
    assert path.read_text(encoding="utf-8") == "mine"


def test_resume_refuses_a_folder_without_a_run(tmp_path):
    assert "not a run directory" in refusal(tmp_path, resume=True)
    assert "not a run directory" in refusal(tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


def test_resume_accepts_the_config_of_the_run(run):
    run.append_event({"round": 0})
    run.close()
    with RunDirectory.create(run.path, CONFIG, resume=True) as again:
        assert again.events() == [{"round": 0}]


@pytest.mark.parametrize(
    ("change", "expected", "got"),
    [
        ({"train": {"lr": 0.5}}, "train.lr: must be 0.25 as in", "got 0.5"),
        ({"seed": 1}, "seed: must be 0 as in", "got 1"),
        ({"method": {"kind": "fedprox", "mu": 0.2}}, "method.mu: must be 0.1 as in", "got 0.2"),
        ({"method": {"kind": "fedprox"}}, "method.mu: must be 0.1 as in", "got 0.01"),
        (
            {"model": {"hidden": [5], "head": "shared"}},
            "model.hidden: must be [100, 100] as in",
            "got [5]",
        ),
    ],
)
def test_resume_with_another_config_names_the_key(run, change, expected, got):
    run.close()
    config = parse(CONFIG.model_dump() | change | {"train": {"lr": 0.25} | change.get("train", {})})
    sentence = refusal(run.path, config, resume=True)
    assert sentence.startswith(expected)
    assert sentence.endswith(got)


def test_a_default_may_be_written_or_left_out(tmp_path):
    for number, mu in enumerate(({}, {"mu": 0.01}, {"mu": "1e-2"})):
        path = tmp_path / str(number)
        config = parse({"method": {"kind": "fedprox"} | mu})
        RunDirectory.create(path, config, resume=False).close()
        for other in ({}, {"mu": 0.01}):
            again = parse({"method": {"kind": "fedprox"} | other})
            RunDirectory.create(path, again, resume=True).close()
        wrong = refusal(path, parse({"method": {"kind": "fedprox", "mu": 0.02}}), resume=True)
        assert wrong.startswith("method.mu: must be 0.01 as in")
        assert wrong.endswith("got 0.02")


def test_nan_and_infinity_equal_themselves_in_a_config(tmp_path):
    config = parse({"method": {"kind": "x", "cap": math.inf, "odd": math.nan}})
    RunDirectory.create(tmp_path, config, resume=False).close()
    RunDirectory.create(tmp_path, config, resume=True).close()


def test_resume_refuses_a_config_that_cannot_be_read(tmp_path):
    (tmp_path / "config.yaml").write_text("format: 1\ndatabase: {host: x}", encoding="utf-8")
    assert "database: unknown key" in refusal(tmp_path, resume=True)


def test_a_run_killed_before_its_first_file_can_be_created_or_resumed(tmp_path):
    for resume in (True, False):
        path = tmp_path / str(resume)
        path.mkdir()
        (path / ".lock").write_text("123", encoding="ascii")
        (path / ".config.yaml.00ff.tmp").touch()
        with RunDirectory.create(path, CONFIG, resume) as run:
            assert run.config() == CONFIG
        assert set(os.listdir(path)) == {".lock", "config.yaml"}


def test_open_refuses_a_folder_without_a_run(tmp_path):
    with pytest.raises(UserError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_events_are_lines_of_json(run):
    assert run.events() == []
    assert run.events_size() == 0
    run.append_event({"round": np.int64(1), "accuracy": torch.tensor(0.5), "text": "a\nb é"})
    run.append_event({"loss": math.nan, "each": (1, np.float32(0.5), np.array([1, 2]))})
    lines = (run.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == run.events()
    assert run.events() == [
        {"round": 1, "accuracy": 0.5, "text": "a\nb é"},
        {"loss": None, "each": [1, 0.5, [1, 2]]},
    ]


def test_truncate_events_removes_events_after_a_checkpoint(run):
    run.append_event({"n": 0})
    size = run.events_size()
    run.append_event({"n": 1})
    run.truncate_events(size)
    assert run.events() == [{"n": 0}]
    run.append_event({"n": 2})
    assert run.events() == [{"n": 0}, {"n": 2}]
    run.truncate_events(0)
    assert run.events() == []


def test_truncate_events_removes_an_incomplete_line(run, caplog):
    run.append_event({"n": 0})
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(b'{"n": ')
    assert run.events() == [{"n": 0}]
    run.truncate_events(run.events_size())
    run.append_event({"n": 1})
    assert run.events() == [{"n": 0}, {"n": 1}]
    assert not caplog.records


def test_lost_events_are_logged(run, caplog):
    run.append_event({"n": 0})
    with caplog.at_level(logging.WARNING):
        run.truncate_events(run.events_size() + 100)
    assert "lost lines" in caplog.text
    assert run.events() == [{"n": 0}]


def test_truncate_events_accepts_a_missing_file(run):
    run.truncate_events(0)
    assert run.events() == []


def test_the_result_is_strict_json(run):
    run.save_result({"matrix": [[0.5, None]], "ACC": np.float64(0.5), "bad": math.inf})
    text = (run.path / "result.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"matrix": [[0.5, None]], "ACC": 0.5, "bad": None}
    assert run.load_result() == json.loads(text)


def test_a_result_is_replaced_atomically(run, monkeypatch):
    run.save_result({"n": 1})
    with pytest.raises(TypeError):
        run.save_result({"n": object()})

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            run.save_result({"n": 2})
    assert run.load_result() == {"n": 1}


@pytest.mark.parametrize("line", [b"hello", b"[]", b"\xff"])
def test_an_invalid_line_is_refused_by_its_number(run, line):
    run.append_event({"n": 1})
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match=r"events\.jsonl: line 2 is not an event"):
        run.events()


def test_an_unreadable_result_is_refused(run):
    with pytest.raises(UserError, match="not finished"):
        run.load_result()
    for text, part in [("{", "cannot be read as JSON"), ("[1]", "must be an object, got list")]:
        (run.path / "result.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=part):
            run.load_result()


def test_a_run_in_use_is_refused(run):
    assert f"in use by process {os.getpid()}" in refusal(run.path, resume=True)
    run.close()
    RunDirectory.create(run.path, CONFIG, resume=True).close()


def test_a_refused_config_leaves_the_lock_free(run):
    run.close()
    refusal(run.path, parse({}), resume=True)
    RunDirectory.create(run.path, CONFIG, resume=True).close()


def test_a_run_that_another_process_creates_meanwhile_is_refused(tmp_path, monkeypatch):
    acquire = lock.FileLock.acquire

    def late(self):
        (tmp_path / "config.yaml").write_text("seed: 5", encoding="utf-8")
        acquire(self)

    monkeypatch.setattr(lock.FileLock, "acquire", late)
    with pytest.raises(UserError, match="already contains a run"):
        RunDirectory.create(tmp_path, CONFIG, resume=False)
    assert (tmp_path / "config.yaml").read_text(encoding="utf-8") == "seed: 5"


HOLDER = """
import sys, time
from pathlib import Path
from perdure.runs.directory import FileLock
FileLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_process_releases_its_lock(run):
    run.close()
    path = os.pathsep.join(filter(None, sys.path))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run.path / ".lock")],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        assert holder.stdout.readline().strip() == b"held"
        assert f"in use by process {holder.pid}" in refusal(run.path, resume=True)
    finally:
        holder.kill()
        holder.communicate()
    RunDirectory.create(run.path, CONFIG, resume=True).close()


def test_peak_memory_grows_with_allocated_memory():
    before = peak_memory_mb()
    assert before is None or before > 10
    if before is not None:
        block = bytearray(os.urandom(1)) * (int(before) * 2**20)
        assert peak_memory_mb() > before * 1.3
        del block
        assert peak_memory_mb() > before * 1.3
