"""Runs of custom models: their code is kept, named in the card, and executed only if trusted."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

import perdure
from perdure.cli.main import main
from perdure.core.errors import UserError

BASE: dict[str, Any] = {
    "data": {"limit": 160},
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 3},
    "train": {"rounds": 2, "max_steps": 2},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}
PARTS = """
from torch import nn
def block(inputs, outputs): return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())
"""
NET = """
import parts_of_net
from torch import nn
class Net(nn.Module):
    def __init__(self, hidden, num_classes):
        super().__init__()
        self.body = parts_of_net.block(64, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.fc = nn.Linear(hidden, num_classes)
    def forward(self, x):
        return self.fc(self.norm(self.body(x.flatten(1))))
"""
IMAGES = np.random.default_rng(0).integers(0, 17, (20, 8, 8)).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a folder with a config and two files of code, forgotten afterwards."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "net_of_user.py").write_text(NET)
    (folder / "parts_of_net.py").write_text(PARTS)
    model = {"kind": "net_of_user.Net", "hidden": 12, "num_classes": "auto"}
    (folder / "c.yaml").write_text(yaml.safe_dump({**BASE, "model": model}))
    yield folder
    forget()


def forget() -> None:
    for name in ("net_of_user", "parts_of_net"):
        sys.modules.pop(name, None)


def test_the_card_names_the_code_and_nobody_executes_it_unasked(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    perdure.run(folder / "c.yaml", out=out)
    card = json.loads((out / "model" / "card.json").read_text())
    hashes = {
        f"method/{name}": hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("net_of_user.py", "parts_of_net.py")
    }
    assert card["code"] == hashes
    forget()
    (folder / "net_of_user.py").unlink()
    (folder / "parts_of_net.py").unlink()
    with pytest.raises(UserError) as refused:
        perdure.load(out)
    for name, value in hashes.items():
        assert f"{name} sha256 {value}" in str(refused.value)
    assert "net_of_user.Net" in str(refused.value)
    assert "trust=True (--trust-code)" in str(refused.value)
    assert "net_of_user" not in sys.modules
    assert perdure.load(out, trust=True).predict(IMAGES).shape == (20,)
    assert all(value in caplog.text for value in hashes.values())
    forget()
    with (out / "method" / "parts_of_net.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(UserError, match=r"parts_of_net.py: differs from the hash in model/card"):
        perdure.load(out, trust=True)


WEIGHTS = """
from pathlib import Path
def weights(): return str(Path(__file__).parent / "weights.pt")
"""
PRETRAINED = """
import torch
from torch import nn
def pretrained(file):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))
    net[1].load_state_dict(torch.load(file))
    return net
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield the model of a package that pip installed into a folder, with a file of weights."""
    folder = tmp_path / "target" / "pretrained_net"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(WEIGHTS + PRETRAINED)
    torch.save(nn.Linear(64, 12).state_dict(), folder / "weights.pt")
    record = tmp_path / "target" / "pretrained_net-1.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("pretrained_net/__init__.py,,\npretrained_net/weights.pt,,\n")
    monkeypatch.syspath_prepend(folder.parent)
    yield {"kind": "pretrained_net.pretrained", "file": {"kind": "pretrained_net.weights"}}
    sys.modules.pop("pretrained_net")


def test_an_installed_package_is_not_copied_and_finds_its_files(
    package: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    perdure.run({**BASE, "model": package}, out=out)
    assert not list((out / "method").rglob("*.py"))
    sys.modules.pop("pretrained_net")
    assert perdure.load(out, trust=True).predict(IMAGES).shape == (20,)


@pytest.mark.slow
def test_predict_asks_for_trust(folder: Path, tmp_path: Path) -> None:
    out, rows = tmp_path / "run", tmp_path / "rows.npy"
    assert main(["run", str(folder / "c.yaml"), "--out", str(out), "-q"]) == 0
    np.save(rows, IMAGES)

    def predict(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "perdure.cli", "predict", str(out), str(rows), *words]
        return subprocess.run(
            command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=120
        )

    refused = predict("--json")
    assert refused.returncode == 2
    assert "sha256" in refused.stderr
    trusted = predict("--json", "--trust-code")
    assert trusted.returncode == 0, trusted.stderr
    assert "method/net_of_user.py" in trusted.stderr.replace("\n", "")
    assert len(json.loads(trusted.stdout)) == 20


def test_a_shadowing_file_in_a_run_of_built_in_kinds_is_not_executed(tmp_path: Path) -> None:
    perdure.run(BASE, out=tmp_path / "run")
    trap = tmp_path / "run" / "method"
    trap.mkdir()
    (trap / "fedavg.py").write_text("raise SystemExit('executed')\n")
    assert perdure.load(tmp_path / "run").predict(IMAGES).shape == (20,)


@pytest.mark.parametrize("kind", ["os.system", "subprocess.run", "torch.hub.load"])
def test_a_function_that_is_loaded_already_is_not_called_either(tmp_path: Path, kind: str) -> None:
    perdure.run(BASE, out=tmp_path / "run")
    path = tmp_path / "run" / "model" / "card.json"
    card = json.loads(path.read_text())
    card["config"]["model"] = {"kind": kind, "arguments": {"command": f"touch {tmp_path}/trap"}}
    path.write_text(json.dumps(card))
    with pytest.raises(UserError, match="executes code"):
        perdure.load(tmp_path / "run")
    assert not (tmp_path / "trap").exists()


def test_a_stopped_run_is_resumed_to_the_same_bits(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = perdure.run(folder / "c.yaml")

    def stop(state: Any, event: dict[str, Any]) -> None:
        if event["event"] == "task":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perdure.run(folder / "c.yaml", out=out, watch=stop)
    forget()
    with pytest.raises(UserError, match="executes code"):
        perdure.resume(out)
    resumed = perdure.resume(out, trust=True)
    assert resumed.values["model_sha256"] == whole.values["model_sha256"]


class Given(nn.Module):
    """A module that is given as an object."""

    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        self.first, self.bn = nn.Linear(64, hidden), nn.BatchNorm1d(hidden)
        self.fc = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bn(self.first(x.flatten(1))).relu())


def test_an_object_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    net, out = Given(), tmp_path / "run"
    frozen = {**BASE, "model": {"kind": net, "frozen": ["first"]}}
    perdure.run(frozen, out=out)
    expected = perdure.load(out).predict(IMAGES)  # this process has it
    monkeypatch.setattr("perdure.core.registry.GIVEN", {})
    with pytest.raises(UserError, match=r"model.kind: must be given again as the same nn.Module"):
        perdure.load(out)
    other = Given()  # of the same structure: the trained and the frozen values are the run's
    assert (perdure.load(out, model=other).predict(IMAGES) == expected).all()
    with pytest.raises(UserError, match="model: must be the one that the run was made with"):
        perdure.load(out, model=Given(13))
    with pytest.raises(UserError, match="model: must be the one that the run was made with"):
        perdure.resume(out, model=other)
    assert perdure.resume(out, model=net).values["rounds"] == 4


def test_frozen_parameters_are_exported_but_neither_trained_nor_sent(tmp_path: Path) -> None:
    net = Given()
    values = {**BASE, "model": {"kind": net, "frozen": ["first"]}}
    part = perdure.run(values, out=tmp_path / "run")
    whole = perdure.run({**BASE, "model": {"kind": net}})
    assert part.values["bytes"]["up"] < whole.values["bytes"]["up"]
    model = perdure.load(tmp_path / "run")
    assert torch.equal(model.network.body.constants["first.weight"], net.first.weight)
    assert "first.weight" not in model.server.params
