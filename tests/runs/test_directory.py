"""The run directory: who may write there, and what stays readable."""

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
from perdure.runs import lock
from perdure.runs.directory import RunDirectory
from perdure.runs.peak_memory import peak_memory_mb

CONFIG = parse({"train": {"lr": 0.25}, "method": {"kind": "fedprox", "mu": 0.1}})


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


def test_a_new_run_keeps_its_complete_config(run):
    kept = yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8"))
    assert kept["train"]["lr"] == 0.25
    assert kept["clients"]["partition"]["kind"] == "iid"
    assert RunDirectory.open(run.path).config() == CONFIG


def test_an_empty_folder_will_do_and_so_will_one_with_other_things(tmp_path):
    (tmp_path / "notes.txt").touch()
    RunDirectory.create(tmp_path, CONFIG, resume=False).close()
    assert RunDirectory.open(tmp_path).config() == CONFIG


def test_a_finished_run_is_not_begun_again(run):
    run.close()
    sentence = refusal(run.path)
    assert "use --resume or another --out" in sentence
    assert str(run.path) in sentence


@pytest.mark.parametrize("name", ["result.json", "events.jsonl", "checkpoints"])
def test_what_looks_like_parts_of_a_run_is_not_written_over(tmp_path, name):
    (tmp_path / name).mkdir()
    assert f"already contains {name}" in refusal(tmp_path)


def test_a_file_is_no_folder(tmp_path):
    path = tmp_path / "file"
    path.write_text("mine", encoding="utf-8")
    assert "must be a directory, got a file" in refusal(path)
    assert "cannot be written" in refusal(path / "below")
    assert path.read_text(encoding="utf-8") == "mine"


def test_resume_needs_a_run(tmp_path):
    assert "not a run directory" in refusal(tmp_path, resume=True)
    assert "not a run directory" in refusal(tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


def test_resume_with_the_same_config(run):
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
        ({"model": {"hidden": [5]}}, "model.hidden: must be [100, 100] as in", "got [5]"),
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


def test_values_that_equal_nothing_still_match_themselves(tmp_path):
    config = parse({"method": {"kind": "x", "cap": math.inf, "odd": math.nan}})
    RunDirectory.create(tmp_path, config, resume=False).close()
    RunDirectory.create(tmp_path, config, resume=True).close()


def test_resume_on_somebody_elses_config(tmp_path):
    (tmp_path / "config.yaml").write_text("database: {host: x}", encoding="utf-8")
    assert "database: unknown key" in refusal(tmp_path, resume=True)


def test_killed_before_the_first_file_a_run_can_begin_or_resume(tmp_path):
    for resume in (True, False):
        path = tmp_path / str(resume)
        path.mkdir()
        (path / ".lock").write_text("123", encoding="ascii")
        (path / ".config.yaml.00ff.tmp").touch()
        with RunDirectory.create(path, CONFIG, resume) as run:
            assert run.config() == CONFIG
        assert set(os.listdir(path)) == {".lock", "config.yaml"}


def test_open_needs_a_run(tmp_path):
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


def test_events_after_a_checkpoint_vanish(run):
    run.append_event({"n": 0})
    size = run.events_size()
    run.append_event({"n": 1})
    run.truncate_events(size)
    assert run.events() == [{"n": 0}]
    run.append_event({"n": 2})
    assert run.events() == [{"n": 0}, {"n": 2}]
    run.truncate_events(0)
    assert run.events() == []


def test_a_half_written_line_is_cut(run, caplog):
    run.append_event({"n": 0})
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(b'{"n": ')
    assert run.events() == [{"n": 0}]
    run.truncate_events(run.events_size())
    run.append_event({"n": 1})
    assert run.events() == [{"n": 0}, {"n": 1}]
    assert not caplog.records


def test_lost_events_are_said_and_not_filled_up(run, caplog):
    run.append_event({"n": 0})
    with caplog.at_level(logging.WARNING):
        run.truncate_events(run.events_size() + 100)
    assert "lost lines" in caplog.text
    assert run.events() == [{"n": 0}]


def test_truncating_no_events_is_fine(run):
    run.truncate_events(0)
    assert run.events() == []


def test_the_result_is_strict_json(run):
    run.save_result({"matrix": [[0.5, None]], "ACC": np.float64(0.5), "bad": math.inf})
    text = (run.path / "result.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"matrix": [[0.5, None]], "ACC": 0.5, "bad": None}
    assert run.load_result() == json.loads(text)


def test_a_result_is_replaced_at_once_or_not_at_all(run, monkeypatch):
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
def test_a_line_that_is_no_event_is_named(run, line):
    run.append_event({"n": 1})
    with (run.path / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(UserError, match=r"events\.jsonl: line 2 is not an event"):
        run.events()


def test_results_that_cannot_be_read(run):
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


def test_a_run_begun_by_another_at_the_same_moment_is_not_taken_over(tmp_path, monkeypatch):
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
from perdure.runs.lock import FileLock
FileLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_living_process_holds_the_lock_and_a_killed_one_does_not(run):
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


def test_peak_memory_grows_with_what_was_held():
    before = peak_memory_mb()
    assert before is None or before > 10
    if before is not None:
        block = bytearray(os.urandom(1)) * (int(before) * 2**20)
        assert peak_memory_mb() > before * 1.3
        del block
        assert peak_memory_mb() > before * 1.3
