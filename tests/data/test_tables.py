"""Tables: CSV and Parquet files with one example per row."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer, load_wine

import perdure
from perdure.cli.main import main
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import load_domains, load_source
from perdure.data.sources import table as table_columns
from perdure.data.sources.table import TableData
from perdure.training.experiment import build_experiment

LINES = """\
id,height,site,weight,adult,animal
1,1.5,north,30,true,dog
2,0.25,south,4.5,false,cat
3,1.75,south,40,true,dog
4,0.3,north,5,true,cat
"""


def write(folder: Path, text: str = LINES, name: str = "a.csv", **keys: Any) -> TableData:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    columns = {"label_column": "animal", "feature_columns": ["weight", "height", "adult"]}
    return TableData(path=str(path), **{**columns, "test_fraction": 0.5, **keys})


def load(config: TableData) -> tuple[np.ndarray, list[str]]:
    """Return all rows, sorted by their first feature, and the names of their classes."""
    source = load_source(config, Rng(0))
    x = np.concatenate([source.train.x.numpy(), source.test.x.numpy()])
    y = [*source.train.y.tolist(), *source.test.y.tolist()]
    order = np.argsort(x[:, 0])
    return x[order], [source.class_names[y[row]] for row in order]


@pytest.mark.parametrize("arrow", [True, False], ids=["pyarrow", "standard library"])
@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_csv_is_read_alike_with_and_without_pyarrow(tmp_path, monkeypatch, arrow, name):
    monkeypatch.setattr(table_columns, "is_installed", lambda _: arrow)
    x, labels = load(write(tmp_path, name=name))
    expected = [[4.5, 0.25, 0], [5, 0.3, 1], [30, 1.5, 1], [40, 1.75, 1]]
    assert np.array_equal(x, np.array(expected, np.float32))
    assert labels == ["cat", "cat", "dog", "dog"]


def test_pyarrow_reads_numbers_without_the_slow_reader(tmp_path, monkeypatch):
    monkeypatch.setattr(table_columns.TableFile, "read_lines", None)
    x, _ = load(write(tmp_path, feature_columns=["weight", "height"]))
    assert x.shape == (4, 2)


def test_parquet(tmp_path):
    frame = pd.DataFrame({"weight": [4, 5, 30, 40], "tail": [True, False, True, True]})
    frame["animal"] = pd.Categorical(["cat", "cat", "dog", "dog"])
    frame.to_parquet(tmp_path / "a.parquet")
    config = TableData(path=str(tmp_path / "a.parquet"), label_column="animal", test_fraction=0.5)
    x, labels = load(config)
    assert x.tolist() == [[4, 1], [5, 0], [30, 1], [40, 1]]
    assert labels == ["cat", "cat", "dog", "dog"]


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"^data\.path: requires pip install 'perdure\[tables\]'"):
        load_source(TableData(path=str(tmp_path / "a.parquet")), Rng(0))


def test_all_other_columns_are_features(tmp_path):
    twice = LINES + "".join(LINES.splitlines(keepends=True)[1:])
    config = write(tmp_path, twice, feature_columns=None, domain_column="site")
    north, south = load_domains(config, Rng(0))
    assert north.feature_names == ("id", "height", "weight", "adult")
    assert (north.name, south.name) == ("north", "south")
    assert len(south.train) + len(south.test) == 4
    assert north.class_names == south.class_names == ("cat", "dog")


def test_a_column_can_name_the_split(tmp_path):
    lines = [f"{i},{'yes' if i % 2 else 'no'},{'Test' if i < 4 else 'train'}" for i in range(10)]
    text = "\n".join(["value,label,part", *lines, ""])
    config = TableData(path=write(tmp_path, text).path, split_column="part")
    source = load_source(config, Rng(0))
    assert source.test.x.flatten().tolist() == [0, 1, 2, 3]
    assert len(source.train) == 6


def test_labels_that_are_integers_are_sorted_as_numbers(tmp_path):
    text = "value;label\n" + "".join(f"{i};{(2, 10, -1)[i % 3]}\n" for i in range(9))
    config = TableData(path=write(tmp_path, text).path, delimiter=";")
    source = load_source(config, Rng(0))
    assert source.class_names == ("-1", "2", "10")


@pytest.mark.parametrize(
    ("text", "keys", "sentence"),
    [
        (LINES, {"label_column": "kind"}, r"^data\.label_column: must be a column of the table: i"),
        (LINES, {"split_column": "part"}, r"^data\.split_column: must be a column of the table"),
        (
            LINES,
            {"feature_columns": ["size"]},
            r"^data\.feature_columns: must be columns.*siz",
        ),
        (LINES, {"feature_columns": ["animal"]}, r"^data\.feature_columns: .*got 'animal'$"),
        (
            LINES,
            {"feature_columns": None},
            r"the column 'site' contains 'north', which is not a",
        ),
        (LINES, {"split_column": "site"}, r"the column 'site' contains 'north', not train, test"),
        (
            LINES.replace("0.25", ""),
            {},
            r"'height' is missing, NaN, infinite or too large in row",
        ),
        (LINES.replace("0.25", "inf"), {}, r"'height' is missing, NaN, infinite or too large in"),
        (LINES.replace(",cat", ",", 1), {}, r"the column 'animal' has no value in row 2"),
        (LINES + "5,1\n", {}, r"line 6 has 2 values for 6 columns"),
        (LINES.splitlines()[0], {}, r"it has no rows"),
        ("", {}, r"it is empty"),
        ("a,a\n1,2\n", {}, r"two columns are called 'a'"),
        ("animal\ncat\n", {"feature_columns": None}, r"it has no columns beside the label"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, text, keys, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        load_source(write(tmp_path, text, **keys), Rng(0))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("data.")


def test_other_files_are_refused(tmp_path):
    for name, sentence in {
        "gone.csv": "a table that exists",
        "a.xlsx": "ends in .csv, .csv.gz, .parquet",
    }.items():
        with pytest.raises(UserError, match=sentence):
            load_source(TableData(path=str(tmp_path / name)), Rng(0))
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="cannot be read"):
        load_source(TableData(path=str(tmp_path / "bad.parquet")), Rng(0))


def test_labels_of_test_rows_alone_and_one_class_are_refused(tmp_path):
    text = "value,label,part\n1,a,train\n2,b,train\n3,c,test\n"
    config = TableData(path=write(tmp_path, text).path, split_column="part")
    with pytest.raises(UserError, match="the label 'c' occurs in test rows alone"):
        load_source(config, Rng(0))
    text = "value,label\n" + "1,a\n" * 30
    values = {"data": {"source": "table", "path": write(tmp_path, text).path}}
    with pytest.raises(UserError, match="two classes or more, got only 'a'"):
        build_experiment(parse(values))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("make", [load_breast_cancer, load_wine])
def test_run_report_and_predict(tmp_path, monkeypatch, capsys, make, suffix):
    monkeypatch.chdir(tmp_path)
    frame = make(as_frame=True).frame
    names = np.array(make().target_names)
    frame["target"] = names[frame["target"]]
    write_frame = {"csv": frame.to_csv, "parquet": frame.to_parquet}[suffix]
    write_frame(f"data.{suffix}", index=False)
    Path("config.yaml").write_text(
        f"data: {{source: table, path: data.{suffix}, label_column: target}}\n"
        "stream: {kind: permuted, tasks: 1}\n"
        "clients: {count: 3}\n"
        "train: {rounds: 10, lr: 0.1}\n"
    )
    assert main(["run", "config.yaml", "--out", "run", "--quiet"]) == 0
    assert main(["report", "run"]) == 0
    shuffled = frame[frame.columns[::-1]].drop(columns="target")  # columns are found by name
    getattr(shuffled, f"to_{suffix}")(f"new.{suffix}", index=False)
    capsys.readouterr()
    assert main(["predict", "run", f"new.{suffix}"]) == 0
    predicted = [line.split(": ")[1] for line in capsys.readouterr().out.splitlines()]
    assert np.mean(np.array(predicted) == frame["target"]) > 0.9
    assert perdure.load("run").feature_names == tuple(frame.columns[:-1])
    shuffled.drop(columns=frame.columns[3]).to_csv("short.csv", index=False)
    assert main(["predict", "run", "short.csv"]) == 2
    assert f"there is no column {frame.columns[3]!r}" in capsys.readouterr().err.replace("\n", " ")
