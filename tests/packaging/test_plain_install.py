"""An installation without extras trains, reports and says which extra is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perdure.federation.admin.folders import NodeFolder, ServerFolder

EXTRAS = (
    "cryptography", "datasets", "dp_accounting", "fastapi", "flwr", "mlflow", "onnx", "onnxruntime",
    "onnxscript", "pandas", "pyarrow", "ray", "starlette", "tensorboard", "timm", "tokenizers",
    "torchvision", "transformers", "uvicorn",
)  # fmt: skip
WITHOUT_EXTRAS = f"""
import shutil, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
which = shutil.which
shutil.which = lambda name, *a, **k: None if name.startswith("fl") else which(name, *a, **k)
from perdure.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
SMALL = ["--set", "stream.tasks=1", "--set", "train.rounds=1", "--set", "train.max_steps=1"]


def plain(folder: Path, *words: str) -> tuple[int, str]:
    """Call the command line in a process that cannot import the packages of the extras."""
    command = [sys.executable, "-c", WITHOUT_EXTRAS, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_plain_installation_trains(tmp_path: Path) -> None:
    code, errors = plain(tmp_path, "run", "permuted-digits", *SMALL, "--out", "run")
    assert code == 0, errors
    assert (tmp_path / "run" / "result.json").is_file()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["run", "permuted-digits", "--set", "privacy.secagg=true", "--out", "run"], "privacy"),
        (["run", "permuted-digits", "--engine", "flower", "--out", "run"], "flower"),
        (["federation", "init", "run"], "flower"),
    ],
)
def test_a_missing_extra_is_named_in_one_sentence(
    tmp_path: Path, words: list[str], extra: str
) -> None:
    code, errors = plain(tmp_path, *words)
    assert code == 2
    assert f"pip install 'perdure[{extra}]'" in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["server", "server"],
        ["renew", "server"],
        ["submit", "permuted-digits", "--server", "server"],
        ["node", "node"],
    ],
)
def test_a_federation_without_flower_stores_nothing(tmp_path: Path, words: list[str]) -> None:
    server = ServerFolder(tmp_path / "server", 9410, 20)
    node = NodeFolder(tmp_path / "node", 0, "localhost:9410")
    for place in (server, node):
        place.path.mkdir()
        place.write()
    code, errors = plain(tmp_path, "federation", *words)
    assert code == 2
    assert "pip install 'perdure[flower]'" in errors
    assert len(errors.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["node.yaml", "server.yaml"]
