"""A run directory whose records were altered: every value of every key is replaced by others.

Tried with card.json, result.json, events.jsonl and a comparison's comparison.json, one value at a
time, at any depth: each becomes a string, a list, a mapping, null, a negative or a huge number, or
is deleted. Every command that reads the file ends with its output or with one sentence. A server
of predictions keeps the model that it has.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil

import numpy as np
import pytest

import perdure
from perdure.cli.main import main
from perdure.core.errors import PerdureError
from perdure.deploy.live_model import LiveModel
from perdure.runs.compare.common_settings import EngineChoice, recorded_choice

CONFIG = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 2},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 1, "max_steps": 1},
    "data": {"limit": 60},
    "device": "cpu",
}
DELETED = object()
VALUES = ("text", [], {}, ["text", None], None, -1, 10**400, 1e308, True, DELETED)
SAMPLE = 60
"""Alterations that are tried per file; drawn from a seed, since all of them take minutes."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("altered") / "run"
    perdure.run(CONFIG, out=path)
    np.save(path.parent / "x.npy", np.zeros((2, 8, 8), np.uint8))
    return path


def places(value, prefix=()):
    """Yield the path of every value in nested lists and mappings."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*prefix, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*prefix, key))


def altered(document, place, value):
    changed = copy.deepcopy(document)
    *parents, last = place
    inner = changed
    for key in parents:
        inner = inner[key]
    if value is DELETED:
        del inner[last]
    else:
        inner[last] = value
    return changed


def alterations(document):
    every = [(place, value) for place in places(document) for value in VALUES]
    return random.Random(0).sample(every, min(SAMPLE, len(every)))


def check(command, capsys, what) -> None:
    """Call a command, which may refuse with one sentence."""
    try:
        code = main(command)
    except Exception as error:
        raise AssertionError(f"{command[0]} with {what}: {error!r}") from error
    shown = capsys.readouterr()
    assert code in (0, 2), what
    assert code == 0 or shown.err.splitlines()[-1].startswith("perdure: error: "), what


def test_altered_cards(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "model" / "card.json"
    card = json.loads(path.read_text())
    for place, value in alterations(card):
        path.write_text(json.dumps(altered(card, place, value)))
        check(["predict", str(run), str(finished.parent / "x.npy")], capsys, (place, value))


def test_altered_cards_of_served_models(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    path = run / "model" / "card.json"
    card = json.loads(path.read_text())
    live = LiveModel(run, seconds=0)
    without_method = [(("config", "method"), DELETED)]
    for number, (place, value) in enumerate([*alterations(card), *without_method]):
        path.write_text(json.dumps(altered(card, place, value)))
        os.utime(path, ns=(number, number))
        assert live.newest().shape == (1, 8, 8), (place, value)
        with contextlib.suppress(PerdureError):
            LiveModel(run)


SELECTIONS = [
    {"selection": {"scores": scores}}
    for scores in ({"a": {"b": 1}}, {"a": {"b": {"0": "x"}}}, {"a": {"b": {}}}, {"a": {}}, [1])
]


@pytest.mark.parametrize("text", [*map(json.dumps, SELECTIONS), "[" * 100_000, "null", ""])
def test_other_comparisons(finished, tmp_path, capsys, text):
    out = tmp_path / "runs"
    shutil.copytree(finished, out / "fedavg" / "seed-0")
    (out / "comparison.json").write_text(text)
    for command in (["report", str(out)], ["watch", str(out), "--once"]):
        check(command, capsys, text[:40])
    assert main(["report", str(out)]) == 0
    assert recorded_choice([], out) == EngineChoice(), "nothing is taken from it"


def test_altered_results(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    result = json.loads((run / "result.json").read_text())
    for number, (place, value) in enumerate(alterations(result)):
        (run / "result.json").write_text(json.dumps(altered(result, place, value)))
        check(["watch", str(run), "--once"], capsys, (place, value))
        page = ["--html", str(tmp_path / "p.html")] if number % 12 == 0 else []  # seconds per page
        check(["report", str(run), *page], capsys, (place, value))


def test_altered_events(finished, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    lines = (run / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    for number, (place, value) in enumerate(alterations(events)):
        changed = altered(events, place, value)
        text = "".join(json.dumps(event) + "\n" for event in changed)
        (run / "events.jsonl").write_text(text)
        check(["watch", str(run), "--once"], capsys, (place, value))
        if number % 12 == 0:
            check(["report", str(run), "--html", str(tmp_path / "p.html")], capsys, (place, value))


DOCUMENTS = ("", "null", "[]", "7", "{}", "[" * 100_000, '{"a": NaN}', "\x00", '"' + "x" * 100)


@pytest.mark.parametrize("text", DOCUMENTS)
@pytest.mark.parametrize("file", ["model/card.json", "result.json", "events.jsonl"])
def test_other_documents(finished, tmp_path, capsys, file, text):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / file).write_text(text + "\n")
    for command in (
        ["predict", str(run), str(finished.parent / "x.npy")],
        ["watch", str(run), "--once"],
        ["report", str(run), "--html", str(tmp_path / "p.html")],
        ["extend", str(run), "--resume"],
    ):
        check(command, capsys, (file, text[:20]))


def test_deleted_events(finished, tmp_path, capsys):
    """The run is shown without rounds, and a resumed one says what is lost."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "events.jsonl").unlink()
    for command in (
        ["watch", str(run), "--once"],
        ["report", str(run), "--html", str(tmp_path / "p.html")],
    ):
        assert main(command) == 0, capsys.readouterr().err
    (run / "result.json").unlink()
    capsys.readouterr()
    assert main(["extend", str(run), "--resume"]) == 0
    assert "events.jsonl has lost lines: 0 of" in capsys.readouterr().err
    assert json.loads((run / "result.json").read_text())["tasks"] == 2
