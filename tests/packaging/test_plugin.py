"""The sample plugin under examples/: built, installed, and found by its entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.registry import Registry
from perdure.data.streams import STREAMS
from perdure.methods.registry import KINDS, METHODS

pytestmark = pytest.mark.slow

PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "perdure-plugin"
TINY = """
stream: {kind: mirrored, tasks: 2, vertical: true}
clients: {count: 3}
model: {kind: perceptron, hidden: 8, num_classes: auto}
method: {kind: fedmedian, quantile: 0.25}
train: {rounds: 1, max_steps: 2}
engine: {kind: serial}
runs: {report: false}
"""


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--no-input", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the plugin is installed in, built without network."""
    folder = tmp_path_factory.mktemp("plugin")
    source, wheels, target = folder / "source", folder / "wheels", folder / "installed"
    subprocess.run(["cp", "-r", str(PLUGIN), str(source)], check=True)
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
    (wheel,) = wheels.glob("*.whl")
    pip("install", "--no-deps", "--target", str(target), str(wheel))
    return target


def perdure(installed: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "perdure.cli", *words]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_plugin_is_not_installed_here() -> None:
    assert "fedmedian" not in METHODS.names()
    assert "mirrored" not in STREAMS.names()


def test_its_method_is_listed_and_explained(installed: Path, tmp_path: Path) -> None:
    listed = perdure(installed, "methods", cwd=tmp_path)
    assert "fedmedian: Yin et al., ICML 2018" in listed.stdout
    explained = perdure(installed, "methods", "fedmedian", cwd=tmp_path)
    assert "quantile (number; >= 0; <= 1), default 0.5" in explained.stdout
    assert "The quantile; 0.5 is the median." in explained.stdout


def test_both_are_in_the_schema(installed: Path, tmp_path: Path) -> None:
    schema = json.loads(perdure(installed, "config", "schema", cwd=tmp_path).stdout)
    methods, streams = schema["$defs"]["Method"]["anyOf"], schema["properties"]["stream"]["anyOf"]
    sections = [
        schema["$defs"][choice["$ref"].rpartition("/")[2]] if "$ref" in choice else choice
        for choice in (*methods, *streams[1:])  # streams begin with the names alone
    ]
    kinds = [section["properties"]["kind"].get("const") for section in sections]
    assert {"fedmedian", "mirrored", "fot", "split"} <= set(kinds)


def test_both_run_and_resume(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TINY, encoding="utf-8")
    done = perdure(installed, "run", "config.yaml", "--out", "run", "--quiet", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert (result["method"], result["tasks"]) == ("fedmedian", 2)
    assert not (tmp_path / "run" / "method").exists()  # a package is not copied
    words = ("run", "config.yaml", "--out", "run", "--resume", "--quiet")
    assert perdure(installed, *words, cwd=tmp_path).returncode == 0


def test_mistakes_in_its_keys(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(TINY, encoding="utf-8")
    words = ("check", "config.yaml", "--set", "stream.overlap=1")
    refused = perdure(installed, *words, cwd=tmp_path)
    assert refused.returncode == 2
    sentence = "stream.overlap: unknown key for kind 'mirrored', got 1; its keys: "
    assert sentence in " ".join(refused.stderr.split())


def test_a_name_that_is_built_in_is_refused(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    registry = Registry(
        key="method.kind", base=object, base_name="object", group="perdure.methods",
        builtin={**KINDS, "fedmedian": "perdure.methods.fedavg.FedAvg"},
    )  # fmt: skip
    assert registry.find("fedavg").__name__ == "FedAvg"
    with pytest.raises(UserError) as caught:
        registry.find("fedmedian")
    assert str(caught.value) == (
        "perdure.methods: must be names that nobody else uses, got 'fedmedian' from "
        "perdure-plugin, which perdure has too"
    )


def test_it_can_be_named_while_it_is_on_the_path(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    assert parse({"stream": {"kind": "mirrored"}}).stream.kind == "mirrored"
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"^stream\.kind: must be permuted, split,"):
        parse({"stream": {"kind": "mirrored"}})
