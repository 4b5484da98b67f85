"""The pages of docs/ can be followed word by word: commands, files and Python."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from perdure.cli.main import main
from perdure.config import parse
from perdure.core.rng import Rng
from perdure.data.load import load_source
from perdure.training.experiment import build_experiment

DOCS = Path(__file__).parents[1] / "docs"


def _blocks(page: str) -> list[tuple[str, str]]:
    """Return the code blocks of a page as (language, text)."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _file(text: str) -> str | None:
    name = re.match(r"# file: (\S+)\n", text)
    return name[1] if name else None


def test_the_methods_of_the_page_are_short() -> None:
    blocks = _blocks("write-a-method.md")
    files = {_file(text): text for kind, text in blocks if kind == "python" and _file(text)}
    assert set(files) == {"brake.py", "smooth.py", "my_scaffold.py"}
    assert all(len(text.splitlines()) <= 75 for text in files.values())


def test_write_a_method_can_be_followed_from_its_first_to_its_last_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = _follow_all("write-a-method.md", capsys)
    (comparison,) = (out for out in outputs if out.startswith("fedavg: ACC"))
    fgt = {name: float(value) for name, value in re.findall(r"(\w+): ACC .*, FGT (.*)", comparison)}
    assert fgt["brake"] < fgt["fedavg"]


def test_get_started_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = _follow_all("get-started.md", capsys)
    (first,) = (out for out in outputs if out.startswith("ACC "))
    assert float(first.split()[1]) > 0.6
    (matrix,) = (out for out in outputs if "FGT" in out and out.startswith("["))
    assert matrix.count("'-'") == 3
    assert (tmp_path / "report.html").is_file()


def test_your_model_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    outputs = _follow_all("models.md", capsys)
    sys.modules.pop("mynet")
    assert any("is valid: fot on split digits" in " ".join(out.split()) for out in outputs)
    assert "True\n" in outputs
    assert "mynet.Classifier\n" in outputs


def test_your_metric_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    *_, printed = _follow_all("metrics.md", capsys)
    sys.modules.pop("mymetric")
    assert printed.startswith("['accuracy', 'auroc', 'mymetric.Kappa']\n[0.")


def test_next_month_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = _follow_all("next-month.md", capsys)
    assert any(out.startswith("task 3: checkpoint of") for out in outputs)
    assert json.loads(Path("runs/digits/result.json").read_text())["tasks"] == 4


def test_ship_it_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    outputs = _follow_all("ship-it.md", capsys)
    assert any(out.startswith("8 predictions in predictions.csv") for out in outputs)
    assert "all 8 labels agree\n" in outputs
    assert any("'probability'" in out and "'task'" in out for out in outputs)


def test_from_notebook_to_paper_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = {"__name__": "__main__"}
    outputs = _follow_all("from-notebook-to-paper.md", capsys, cells)
    assert outputs[0].startswith("Result(fedavg, seed 0, 2 tasks, task_agnostic ACC 0.")
    assert outputs[3:6] == ["True\n", "", "3\n"]
    assert outputs[6].startswith("['fedavg', 'pull.Pull-strength=0.05']\n%")
    assert "\\textbf{" in outputs[6]
    assert "sweep-train-lr-ACC-task_agnostic" in outputs[7]


def test_the_files_of_the_data_page_can_be_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, text in _blocks("data.md"):
        if kind == "python":
            _follow(kind, text)
    assert json.loads(Path("runs/wine/result.json").read_text())["clients"]["names"] == [
        "cellar 0", "cellar 1", "cellar 2",
    ]  # fmt: skip
    config = parse({"data": {"source": "npz", "path": "mine.npz"}, "stream": {"tasks": 2}})
    assert build_experiment(config).stream.class_names == ("cat", "dog", "fox", "owl")
    (function,) = (yaml.safe_load(text) for _, text in _blocks("data.md") if "mydata.load," in text)
    assert build_experiment(parse(function)).stream.class_names == ("high", "low")
    sys.modules.pop("mydata")


def test_the_layouts_of_the_data_page_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [text for kind, text in _blocks("data.md") if kind == "text"]
    (tree,), (lines,), (table,) = (
        [text for text in texts if text.startswith(start)] for start in ("animals/", "{", "age,")
    )
    folder = Path()
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        if depth == 2:
            _write_images(folder / name)
        folder = Path("animals", name) if depth == 1 else folder
    Path("d.jsonl").write_text(lines.replace("uber", "balance"))
    Path("d.csv").write_text(table + "".join(table.splitlines(True)[1:]))
    names = {
        ("folder", "animals"): ("cat", "dog"),
        ("text", "d.jsonl"): ("balance",),
        ("table", "d.csv"): ("sick", "well"),
    }
    for (source, path), classes in names.items():
        keys = (
            {"label_column": "diagnosis", "feature_columns": ["age"]} if source == "table" else {}
        )
        data = parse({"data": {"source": source, "path": path, **keys}}).data
        assert load_source(data, Rng(0)).class_names == classes


def _write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number in range(2):
        Image.new("L", (4, 4), number).save(folder / f"{number}.png")


def _follow_all(
    page: str, capsys: pytest.CaptureFixture[str], cells: dict[str, Any] | None = None
) -> list[str]:
    """Do what the blocks of a page say; return what each printed.

    Args:
        page: Name of the file.
        capsys: Captures what is printed.
        cells: Names that the blocks share, if they are cells of one notebook.
    """
    outputs = []
    for kind, text in _blocks(page):
        capsys.readouterr()
        _follow(kind, text, cells)
        outputs.append(capsys.readouterr().out)
    return outputs


def _follow(kind: str, text: str, cells: dict[str, Any] | None = None) -> None:
    """Save a file, run the commands of perdure, or execute Python."""
    name = _file(text)
    if name is not None:
        Path(name).write_text(text, encoding="utf-8")
    elif kind == "sh":
        for line in text.splitlines():
            program, *words = shlex.split(line, comments=True)
            if program == "perdure":
                assert main([*words]) == 0, line
            else:
                assert program in ("make", "pip", ".venv/bin/perdure"), line
    elif kind == "python":
        exec(compile(text, "page", "exec"), {} if cells is None else cells)
    else:
        assert kind in ("text", "toml")
