"""A stranger's run directory tries to have its code executed, or files outside it read.

Tried in config.yaml and card.json, with a Python file in the run's folder method/ and in the
working folder, with every command that takes a run directory:

    a method, a method to combine with, a stream, data, a metric, a model by dotted path
    data of an extension, a model as an argument of a model
    classes that every process has loaded: `subprocess.Popen` as a model, or as an argument of one
    functions of installed packages: `os.system`
    files outside the run: the data, the initial weights, the backbone
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys

import numpy as np
import pytest
import yaml

import perdure
from perdure.cli.main import main
from perdure.config import Config, read_saved
from perdure.config.overrides import KIND_SECTIONS
from perdure.config.section import kind_sections
from perdure.core.errors import UserError
from perdure.deploy.live_model import LiveModel
from perdure.federation.messages import BadMessage
from perdure.federation.node.policy import NodePolicy
from perdure.runs.records import read_runs

CONFIG = {
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 2},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 1, "max_steps": 1},
    "data": {"limit": 60},
    "device": "cpu",
}
CODE = """
from pathlib import Path
Path({mark!r}).write_text("executed")
from perdure.methods.fedavg import FedAvg as Method
from perdure.data.streams.permuted import PermutedStream as Stream
from perdure.evaluation.metrics import Accuracy as Metric
from torch.nn import Linear as Net
def data(): return None
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("stranger") / "run"
    perdure.run(CONFIG, out=path)
    return path


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "executed"


@pytest.fixture
def run(finished, tmp_path, mark, monkeypatch):
    """A run directory with code, from whose folder of code the commands are called."""
    path = tmp_path / "run"
    shutil.copytree(finished, path)
    (path / "method").mkdir()
    (path / "method" / "strange_code.py").write_text(CODE.format(mark=str(mark)))
    monkeypatch.chdir(path / "method")
    np.save(tmp_path / "x.npy", np.zeros((2, 8, 8), np.uint8))
    return path


def attacks(mark: str) -> dict[str, dict]:
    touch = {"args": ["touch", mark]}
    inner = {"kind": "subprocess.Popen", **touch}
    return {
        "method": {"method": {"kind": "strange_code.Method"}},
        "combined": {"method": {"kind": "fedavg", "with": [{"kind": "strange_code.Method"}]}},
        "stream": {"stream": {"kind": "strange_code.Stream", "tasks": 2}},
        "data": {"data": {"source": "strange_code.data"}},
        "metric": {"evaluate": {"metrics": ["accuracy", "strange_code.Metric"]}},
        "model": {"model": {"kind": "strange_code.Net", "in_features": 64, "out_features": 4}},
        "extension": {"extensions": [{"data": [{"source": "strange_code.data", "name": "n"}]}]},
        "argument": {
            "model": {"kind": "torch.nn.Linear", "in_features": {"kind": "strange_code.Net"}}
        },
        "class": {"model": inner},
        "class_argument": {"model": {"kind": "torch.nn.Linear", "in_features": inner}},
        "function": {"model": {"kind": "os.system", "command": f"touch {mark}"}},
        "class_method": {"method": inner},
        "class_stream": {"stream": inner},
        "class_data": {"data": {"source": "subprocess.Popen", **touch}},
    }


ATTACKS = list(attacks(""))


def alter(run, changes: dict) -> None:
    """Replace sections of the config in config.yaml and in card.json."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | changes))
    card = json.loads((run / "model" / "card.json").read_text())
    card["config"] |= changes
    (run / "model" / "card.json").write_text(json.dumps(card))


def commands(run) -> dict[str, object]:
    x = str(run.parent / "x.npy")
    return {
        "predict": ["predict", str(run), x],
        "export": [
            "export", str(run), "--format", "state_dict", "--out", str(run.parent / "m.pt")
        ],
        "watch": ["watch", str(run), "--once"],
        "report": ["report", str(run)],
        "page": ["report", str(run), "--html", str(run.parent / "page.html")],
        "extend": ["extend", str(run), "--tasks", "1"],
        "rewind": ["rewind", str(run), "--task", "1"],
        "resume": ["extend", str(run), "--resume"],
        "load": lambda: perdure.load(run),
        "python_resume": lambda: perdure.resume(run),
        "serve": lambda: LiveModel(run),
        "learner": lambda: perdure.Learner(run).predict(np.zeros((2, 8, 8), np.uint8)),
        "compare": lambda: read_runs([run]),
    }  # fmt: skip


def call(command) -> None:
    """Call a command; one sentence is all that it may answer besides its result."""
    if isinstance(command, list):
        assert main(command) in (0, 2)
        return
    with contextlib.suppress(UserError):
        command()


COMMANDS = (
    "predict", "export", "watch", "report", "page", "extend", "rewind", "resume", "load",
    "python_resume", "serve", "learner", "compare",
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_is_not_executed(run, mark, attack):
    alter(run, attacks(str(mark))[attack])
    for name in COMMANDS:
        call(commands(run)[name])
        assert not mark.exists(), name


def in_section(section: str) -> dict:
    """Return a config in which a section names a class of the stranger's file."""
    changes = {KIND_SECTIONS[section].kind_key: "strange_code.Kind"}
    for key in reversed(section.split(".")):
        changes = {key: changes}
    return changes


def test_every_section_with_kinds_is_tried():
    """A section that is added later cannot be forgotten here."""
    assert {path for path, _ in kind_sections(Config())} == set(KIND_SECTIONS)


@pytest.mark.parametrize("section", KIND_SECTIONS)
def test_no_section_executes_code_that_is_not_trusted(run, mark, section):
    alter(run, in_section(section))
    with pytest.raises(UserError, match=r"strange_code\.Kind.*--trust-code"):
        perdure.resume(run)
    for name in ("predict", "extend", "resume", "load", "serve"):
        call(commands(run)[name])
        assert not mark.exists(), name


@pytest.mark.parametrize("section", KIND_SECTIONS)
def test_no_node_executes_code_that_its_owner_did_not_list(run, mark, section):
    with pytest.raises(BadMessage, match=r"policy\.code .*strange_code\.Kind"):
        NodePolicy().check_run(read_saved(in_section(section)))
    assert not mark.exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_runs_of_built_in_methods_work_in_spite_of_files_that_nobody_needs(run, mark, name, capsys):
    command = commands(run)[name]
    if isinstance(command, list):
        assert main(command) == 0, capsys.readouterr().err
    else:
        command()
    assert not mark.exists()


def test_code_is_executed_with_consent(run, mark, capsys):
    alter(run, {"method": {"kind": "strange_code.Method"}})
    predict = commands(run)["predict"]
    assert main(predict) == 2
    assert "--trust-code" in capsys.readouterr().err
    assert main([*predict, "--trust-code"]) == 0
    del sys.modules["strange_code"]
    assert mark.exists()
    assert "method/strange_code.py sha256" in capsys.readouterr().err


# ---- files outside the run directory


OUTSIDE = {
    "data": {"data": {"source": "npz", "path": "PIPE"}},
    "weights": {"model": {"kind": "mlp", "hidden": [4], "init": "PIPE"}},
}


@pytest.mark.parametrize("name", ["predict", "export", "watch", "report", "load", "serve"])
@pytest.mark.parametrize("attack", OUTSIDE)
def test_files_outside_the_run_are_not_opened(run, attack, name):
    """The file is a pipe that nobody writes: a command that opened it would wait for ever."""
    pipe = run.parent / "outside.npz"
    os.mkfifo(pipe)
    text = json.dumps(OUTSIDE[attack]).replace("PIPE", str(pipe))
    try:
        alter(run, json.loads(text))
        call(commands(run)[name])
    finally:
        pipe.unlink()
