"""The installed wheel: commands that need bundled files work outside the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
TINY = [
    "--set", "train.rounds=1", "--set", "stream.tasks=1", "--set", "data.limit=100",
    "--engine", "serial", "--quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the tree, built without network."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "benchmarks", "claims"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=tree, check=True, capture_output=True
    )
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path) -> Path:
    """The folder into which pip has installed the wheel alone."""
    folder = wheel.parent / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(folder), str(wheel)], check=True, capture_output=True)
    return folder


def _perdure(site: Path, cwd: Path, *words: str) -> str:
    """The output of a command of the installed wheel, in a folder outside the repository."""
    environment = {key: os.environ[key] for key in os.environ if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "perdure", *words],
        cwd=cwd, env={**environment, "PYTHONPATH": str(site), "COLUMNS": "200"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_all_files_of_the_package(wheel: Path) -> None:
    package = ROOT / "src" / "perdure"
    ours = {
        str(path.relative_to(ROOT / "src"))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("perdure/")}
    assert held == ours
    assert any(name.startswith("perdure/recipes/") and name.endswith(".yaml") for name in held)


def test_it_is_the_installed_package_that_runs(site: Path, tmp_path: Path) -> None:
    code = "import perdure; print(perdure.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()) == site / "perdure" / "__init__.py"


def test_recipes_are_listed_and_run(site: Path, tmp_path: Path) -> None:
    names = [recipe["name"] for recipe in json.loads(_perdure(site, tmp_path, "recipes", "--json"))]
    assert "permuted-digits" in names
    assert len(names) == len(list((ROOT / "src/perdure/recipes").glob("*.yaml")))
    _perdure(site, tmp_path, "run", "permuted-digits", *TINY, "--out", "out")
    assert json.loads((tmp_path / "out" / "result.json").read_text())["rounds"] == 1


def test_benchmarks_and_claims_stay_out(wheel: Path) -> None:
    top = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"perdure"}


def test_the_environment_is_that_of_the_wheel(site: Path, tmp_path: Path) -> None:
    document = json.loads(_perdure(site, tmp_path, "env", "--json"))
    assert "torch" in document["packages"]
    assert "flwr" in document["extras"]["flower"]
    assert "Usage: perdure demo" in _perdure(site, tmp_path, "demo", "--help")
