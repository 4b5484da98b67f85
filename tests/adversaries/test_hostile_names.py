"""Names that a terminal or a spreadsheet would obey: of classes, tasks, inputs, runs.

Tried: escape sequences that change colors, clear the screen, move the cursor, set the title or
write to the clipboard; a carriage return that hides a line; characters that reverse the direction;
and names that a spreadsheet takes for a formula.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import perdure
from perdure.cli.console import print_error, print_json, setup_logging, stdout_console, text_table
from perdure.cli.main import main
from perdure.report.comparison import compare_groups
from perdure.report.table_writers import table_files, to_csv
from perdure.report.tables import TableStyle
from perdure.runs.records import read_runs

ORDERS = (
    "\x1b[31mred", "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]52;c;ZXZpbA==\x07", "a\rb",
    "a\x9b31mb", "a\x7fb", "a\u202eb", "a\u2066b", "a\x00b", "\x08\x08\x08",
)  # fmt: skip
FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "=cmd|' /C calc'!A0", "\t=1", "\r=1")
CONFIG = {
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 2},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 1, "max_steps": 1},
    "data": {"limit": 60},
    "device": "cpu",
}


def obeyed(text: str) -> list[str]:
    return [letter for letter in text if not letter.isprintable() and letter != "\n"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("names") / "run"
    perdure.run(CONFIG, out=path)
    np.save(path.parent / "x.npy", np.zeros((2, 8, 8), np.uint8))
    return path


def with_class_names(finished, tmp_path, name: str):
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    card = json.loads((run / "model" / "card.json").read_text())
    card["class_names"] = [name] * 10
    (run / "model" / "card.json").write_text(json.dumps(card))
    return run


@pytest.mark.parametrize("name", ORDERS)
def test_class_names_are_shown_and_not_obeyed(finished, tmp_path, capsys, name):
    run = with_class_names(finished, tmp_path, name)
    for options in ([], ["--proba"], ["--json"]):
        assert main(["predict", str(run), str(finished.parent / "x.npy"), *options]) == 0
        shown = capsys.readouterr().out
        assert obeyed(shown) == []
    assert json.loads(shown)[0]["class"] == name


@pytest.mark.parametrize("name", ORDERS)
def test_other_texts_are_shown_and_not_obeyed(capsys, name):
    setup_logging()
    stdout_console().print(name)
    stdout_console().print(text_table([name, "b"], [[name, name]]))
    print_json({name: [name]})
    print_error("error", f"{name}: must be a name")
    logging.getLogger("perdure.test").warning("%s is late", name)
    shown = capsys.readouterr()
    assert obeyed(shown.out + shown.err) == []
    assert "is late" in shown.err


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\u202eb"])
def test_names_of_runs_and_tasks(finished, tmp_path, capsys, name):
    run = tmp_path / name
    shutil.copytree(finished, run)
    result = json.loads((run / "result.json").read_text())
    result["method"] = name
    (run / "result.json").write_text(json.dumps(result))
    for command in (["watch", str(run), "--once"], ["report", str(run)], ["report", str(tmp_path)]):
        assert main(command) == 0
        shown = capsys.readouterr()
        assert obeyed(shown.out + shown.err) == []


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_in_predictions_are_text(finished, tmp_path, name):
    run = with_class_names(finished, tmp_path, name)
    out = tmp_path / "p.csv"
    command = ["predict", str(run), str(finished.parent / "x.npy"), "--proba", "--out", str(out)]
    assert main(command) == 0
    with out.open(newline="") as file:
        rows = list(csv.reader(file))
    expected = name.replace("\r", "\\r") if name.startswith("\r") else "'" + name
    assert [row[2] for row in rows[1:]] == [expected] * 2
    assert not any(cell.startswith(("=", "+", "@")) for row in rows for cell in row)
    assert all(float(cell) >= 0 for cell in rows[1][3:4]), "numbers stay numbers"


@pytest.mark.parametrize("name", ORDERS)
def test_files_hold_nothing_that_a_terminal_obeys(finished, tmp_path, name):
    run, out = with_class_names(finished, tmp_path, name), tmp_path / "p.csv"
    command = ["predict", str(run), str(finished.parent / "x.npy"), "--proba", "--out", str(out)]
    assert main(command) == 0
    comparison = compare_groups({name: read_runs([finished]).records})
    files = table_files(comparison, TableStyle())
    assert {Path(file).suffix for file in files} == {".csv", ".md", ".tex"}
    for text in (out.read_text(), *files.values()):
        assert obeyed(text) == []


def test_signs_of_latex_are_text(finished):
    comparison = compare_groups({r"\input{a}%$x^2": read_runs([finished]).records})
    texts = [text for file, text in table_files(comparison, TableStyle()).items() if "tex" in file]
    assert texts
    for text in texts:
        assert r"\textbackslash{}input\{a\}\%\$x\^{}2" in text.replace(r"\allowbreak{}", "")


def test_formulas_in_tables_of_comparisons_are_text(finished):
    records = read_runs([finished]).records
    rows = list(csv.reader(io.StringIO(to_csv(compare_groups({"=1+1": records, "-x": records})))))
    assert {row[0] for row in rows[1:]} == {"'=1+1", "'-x"}
    assert float(rows[1][5]) is not None
