"""An installation without extras trains, reports and says which extra is missing."""

from __future__ import annotations

import json
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
import contextlib, io, json, os, shutil, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
which = shutil.which
shutil.which = lambda name, *a, **k: None if name.startswith("fl") else which(name, *a, **k)
from perdure.cli.main import main
for folder, words in json.loads(sys.argv[1]):
    os.chdir(folder)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    print(json.dumps([code, errors.getvalue()]), flush=True)
"""
SMALL = ["--set", "stream.tasks=1", "--set", "train.rounds=1", "--set", "train.max_steps=1"]
TRAINING = ["run", "permuted-digits", *SMALL, "--out", "run"]
LACKING = {
    "secagg": (
        ["run", "permuted-digits", "--set", "privacy.secagg=true", "--out", "run"],
        "privacy",
    ),
    "engine": (["run", "permuted-digits", "--engine", "flower", "--out", "run"], "flower"),
    "init": (["federation", "init", "run"], "flower"),
}
FEDERATION = {
    "server": ["server", "server"],
    "renew": ["renew", "server"],
    "submit": ["submit", "permuted-digits", "--server", "server"],
    "node": ["node", "node"],
}


Outcomes = dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with a folder of each command; those of federations have two more."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("train", *LACKING, *FEDERATION):
        (folder / name).mkdir()
    for name in FEDERATION:
        places = [
            ServerFolder(folder / name / "server", 9410, 20),
            NodeFolder(folder / name / "node", 0, "localhost:9410"),
        ]
        for place in places:
            place.path.mkdir()
            place.write()
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    """Return code and errors of all commands, from a process without the packages of the extras."""
    commands = {
        "train": TRAINING,
        **{name: words for name, (words, _) in LACKING.items()},
        **{name: ["federation", *words] for name, words in FEDERATION.items()},
    }
    given = json.dumps([(str(folder / name), words) for name, words in commands.items()])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, given], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(commands), done.stderr
    return {name: tuple(json.loads(line)) for name, line in zip(commands, lines, strict=True)}


def test_a_plain_installation_trains(outcomes: Outcomes, folder: Path) -> None:
    code, errors = outcomes["train"]
    assert code == 0, errors
    assert (folder / "train" / "run" / "result.json").is_file()
    assert (folder / "train" / "run" / "report.html").is_file()


@pytest.mark.parametrize("name", LACKING)
def test_a_missing_extra_is_named_in_one_sentence(
    outcomes: Outcomes, folder: Path, name: str
) -> None:
    code, errors = outcomes[name]
    assert code == 2
    assert f"pip install 'perdure[{LACKING[name][1]}]'" in errors
    assert len(errors.splitlines()) == 1
    assert not (folder / name / "run").exists()


@pytest.mark.parametrize("name", FEDERATION)
def test_a_federation_without_flower_stores_nothing(
    outcomes: Outcomes, folder: Path, name: str
) -> None:
    code, errors = outcomes[name]
    assert code == 2
    assert "pip install 'perdure[flower]'" in errors
    assert len(errors.splitlines()) == 1
    kept = sorted(path.name for path in (folder / name).glob("*/*"))
    assert kept == ["node.yaml", "server.yaml"]
