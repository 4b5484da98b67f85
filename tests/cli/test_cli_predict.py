"""perdure predict on every kind of input."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shells import TINY, Shell, one_sentence
from sklearn.datasets import load_digits

import perdure

DIGITS = np.rint(load_digits().images[:12] * (255 / 16)).astype(np.uint8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    perdure.run(TINY, out=path)
    return path


@pytest.fixture
def expected(trained: Path) -> list[int]:
    return [int(label) for label in perdure.load(trained).predict(DIGITS)]


@pytest.mark.parametrize("shape", [(12, 8, 8), (12, 8, 8, 1), (12, 1, 8, 8)])
def test_an_array(shell: Shell, trained: Path, expected: list[int], shape: tuple[int]) -> None:
    np.save("x.npy", DIGITS.reshape(shape))
    said = shell("predict", trained, "x.npy")
    assert said.code == 0
    assert said.out.splitlines() == [f"{i}: {label}" for i, label in enumerate(expected)]


def test_one_row(shell: Shell, trained: Path, expected: list[int]) -> None:
    np.save("x.npy", DIGITS[3])
    assert shell("predict", trained, "x.npy").out == f"0: {expected[3]}\n"


@pytest.mark.parametrize("name", ["x", "x_test"])
def test_an_npz(shell: Shell, trained: Path, expected: list[int], name: str) -> None:
    np.savez("x.npz", **{name: DIGITS, "y_test": np.zeros(12)})
    said = shell("predict", trained, "x.npz", "--out", "labels.npy")
    assert said.code == 0
    assert np.load("labels.npy").tolist() == expected


def test_a_folder_of_images_and_one_of_them(
    shell: Shell, trained: Path, expected: list[int]
) -> None:
    Path("pictures").mkdir()
    for number, pixels in enumerate(DIGITS):
        Image.fromarray(pixels).save(f"pictures/{number:02d}.png")
    Path("pictures/notes.txt").write_text("not an image")
    assert shell("predict", trained, "pictures", "--out", "all.csv").code == 0
    lines = [f"{i:02d}.png,{label},{label}" for i, label in enumerate(expected)]
    assert Path("all.csv").read_text().splitlines() == ["input,label,class", *lines]
    assert shell("predict", trained, "pictures/05.png").out == f"05.png: {expected[5]}\n"


def test_images_are_brought_to_size_only_where_training_did_it(
    shell: Shell, trained: Path, tmp_path: Path
) -> None:
    large = np.kron(DIGITS, np.ones((1, 2, 2), dtype=np.uint8))
    np.save("x.npy", large)
    one_sentence(shell("predict", trained, "x.npy"), "x.npy", "(1, 16, 16)", "(1, 8, 8)")
    perdure.run({**TINY, "data": {"source": "digits", "limit": 120, "size": 8}}, out="sized")
    said = shell("predict", "sized", "x.npy")
    assert said.code == 0
    assert "(1, 16, 16) resized to (1, 8, 8)" in said.err


def test_bad_inputs(shell: Shell, trained: Path) -> None:
    np.save("float.npy", DIGITS / 255)
    np.save("wide.npy", DIGITS.reshape(12, 4, 16))
    np.save("flat.npy", DIGITS.reshape(12, 64))
    np.savez("empty.npz", y=np.zeros(3))
    Path("cut.npy").write_bytes(Path("wide.npy").read_bytes()[:100])
    Path("cut.png").write_bytes(b"no picture")
    Path("words.txt").write_text("no picture")
    Path("hollow").mkdir()
    before = shell.files()
    for name, *parts in (
        ("float.npy", "float64", "uint8"),
        ("wide.npy", "(1, 4, 16)", "(1, 8, 8)"),
        ("flat.npy", "(1, 12, 64)", "(1, 8, 8)"),
        ("empty.npz", "got y", "x_test"),
        ("cut.npy", "can be read"),
        ("cut.png", "can be read"),
        ("words.txt", ".npy"),
        ("hollow", "holds images"),
        ("gone.npy", "exists"),
    ):
        one_sentence(shell("predict", trained, name, "--out", "y.csv"), name, *parts)
    assert shell.files() == before


def test_a_damaged_model_is_refused(shell: Shell, trained: Path) -> None:
    np.save("x.npy", DIGITS)
    shutil.copytree(trained, "damaged")
    weights = Path("damaged/model/model.safetensors")
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    one_sentence(shell("predict", "damaged", "x.npy"), "model.safetensors", "hash")


def test_a_file_that_cannot_be_written(shell: Shell, trained: Path) -> None:
    np.save("x.npy", DIGITS)
    one_sentence(shell("predict", trained, "x.npy", "--out", "gone/y.csv"), "--out gone/y.csv")


def test_an_array_of_numbers(shell: Shell) -> None:
    x = np.random.default_rng(0).normal(size=(40, 5))
    y = np.array(["low", "high"])[(x[:, 0] > 0).astype(int)]
    np.savez("numbers.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data, stream = {"source": "npz", "path": "numbers.npz"}, {"kind": "permuted", "tasks": 1}
    perdure.run({**TINY, "data": data, "stream": stream}, out="numbers")
    labels = perdure.load("numbers").predict(x)
    np.save("x.npy", x)
    names = ("high", "low")
    expected = [f"{row}: {names[label]}" for row, label in enumerate(labels)]
    assert shell("predict", "numbers", "x.npy").out.splitlines() == expected
    assert shell("predict", "numbers", "numbers.npz").out.splitlines() == expected
    np.save("one.npy", x[7])
    assert shell("predict", "numbers", "one.npy").out == f"0: {names[labels[7]]}\n"
    for name, rows, parts in (
        ("wide", np.zeros((3, 6)), ("(5,)", "(6,)")),
        ("nan", np.full((3, 5), np.nan), ("row 0", "NaN")),
        ("words", np.full((3, 5), "low"), ("not numbers",)),
    ):
        np.save(f"{name}.npy", rows)
        one_sentence(shell("predict", "numbers", f"{name}.npy"), f"{name}.npy", *parts)


def test_probabilities_of_all_classes(shell: Shell, trained: Path, expected: list[int]) -> None:
    np.save("x.npy", DIGITS)
    table = perdure.load(trained).probabilities(DIGITS)
    said = shell("predict", trained, "x.npy", "--proba", "--json")
    rows = json.loads(said.out)
    assert [row["label"] for row in rows] == expected
    assert [row["probability"] for row in rows] == pytest.approx(table.max(1))
    assert {(row["task"], row["margin"], row["known"]) for row in rows} == {(None, None, True)}
    np.testing.assert_allclose([list(row["probabilities"].values()) for row in rows], table)
    assert list(rows[0]["probabilities"]) == [str(digit) for digit in range(10)]
    first = shell("predict", trained, "x.npy", "--proba").out.splitlines()[0]
    assert first == f"0: {expected[0]} (probability {table[0].max():.3f})"
    assert shell("predict", trained, "x.npy", "--proba", "--out", "p.npy").code == 0
    np.testing.assert_array_equal(np.load("p.npy"), table)
    assert shell("predict", trained, "x.npy", "--proba", "--out", "p.csv").code == 0
    head, *lines = csv.reader(Path("p.csv").read_text().splitlines())
    assert head[:7] == ["input", "label", "class", "probability", "task", "margin", "known"]
    assert head[7:] == [f"P({digit})" for digit in range(10)]
    np.testing.assert_allclose([[float(p) for p in line[7:]] for line in lines], table)


def test_tasks_in_batches_of_one_task(shell: Shell) -> None:
    method = {"kind": "fedprotip", "routing": "batch", "routing_batch": 12}
    perdure.run({**TINY, "method": method, "stream": {"kind": "split", "tasks": 2}}, out="routed")
    np.save("x.npy", DIGITS)
    model = perdure.load("routed")
    for words, same in ((), False), (("--same-task",), True):
        rows = json.loads(shell("predict", "routed", "x.npy", "--proba", "--json", *words).out)
        tasks = model.predict_tasks(DIGITS, same_task=same)
        assert [row["task"] for row in rows] == list(tasks)
        assert all(row["margin"] >= 0 for row in rows)
        printed = shell("predict", "routed", "x.npy", "--proba", *words).out.splitlines()
        assert all(f"task {t + 1})" in line for line, t in zip(printed, tasks, strict=True))
    assert len(set(tasks)) == 1


def test_bad_inputs_are_skipped_by_name(shell: Shell, trained: Path, expected: list[int]) -> None:
    Path("pictures").mkdir()
    for number in (0, 1, 2):
        Image.fromarray(DIGITS[number]).save(f"pictures/{number}.png")
    Path("pictures/1.png").write_bytes(b"no picture")
    one_sentence(shell("predict", trained, "pictures"), "1.png")
    said = shell("predict", trained, "pictures", "--skip-bad")
    assert said.code == 0
    assert said.out.splitlines() == [f"{n}.png: {expected[n]}" for n in (0, 2)]
    assert "1.png" in said.err
    assert said.err.count("skipped") == 1
    for number in (0, 2):
        Path(f"pictures/{number}.png").write_bytes(b"")
    said = shell("predict", trained, "pictures", "--skip-bad")
    assert said.code == 2
    assert "a folder that holds images that can be read" in said.err.splitlines()[-1]


def test_bad_rows_of_numbers_are_skipped_by_number(shell: Shell) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3))
    lines = [",".join(map(str, row)) + f",{'ab'[int(row[0] > 0)]}" for row in x]
    Path("t.csv").write_text("\n".join(["u,v,w,label", *lines]) + "\n")
    data, stream = {"source": "table", "path": "t.csv"}, {"kind": "permuted", "tasks": 1}
    perdure.run({**TINY, "data": data, "stream": stream}, out="table")
    all_rows = shell("predict", "table", "t.csv").out.splitlines()
    assert len(all_rows) == 40
    broken = ["u,v,w", *(line.rpartition(",")[0] for line in lines[:6])]
    broken[2] = "1,what,2"
    broken[4] = "1,,2"
    Path("new.csv").write_text("\n".join(broken) + "\n")
    one_sentence(shell("predict", "table", "new.csv"), "new.csv", "'what'")
    said = shell("predict", "table", "new.csv", "--skip-bad")
    assert said.out.splitlines() == [all_rows[row] for row in (0, 2, 4, 5)]
    assert "row 1 " in said.err
    assert "row 3 " in said.err
    x[7, 1] = np.nan
    np.save("x.npy", x)
    one_sentence(shell("predict", "table", "x.npy"), "row 7")
    said = shell("predict", "table", "x.npy", "--skip-bad")
    assert said.out.splitlines() == [line for row, line in enumerate(all_rows) if row != 7]
    np.save("x.npy", np.full((2, 3), np.inf))
    assert shell("predict", "table", "x.npy", "--skip-bad").code == 2


def test_bad_lines_of_texts_are_skipped(shell: Shell) -> None:
    words = ["red apple", "blue sea", "red rose", "blue sky"] * 6
    rows = [{"text": text, "label": text.split()[0]} for text in words]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"source": "text", "path": "t.jsonl", "features": 64}
    stream = {"kind": "permuted", "tasks": 1}
    perdure.run({**TINY, "data": data, "stream": stream}, out="texts")
    expected = shell("predict", "texts", "t.jsonl").out.splitlines()
    text = [*Path("t.jsonl").read_text().splitlines()[:3], "{", '{"label": 3}']
    Path("bad.jsonl").write_text("\n".join(text))
    one_sentence(shell("predict", "texts", "bad.jsonl"), "row 3")
    said = shell("predict", "texts", "bad.jsonl", "--skip-bad")
    assert said.out.splitlines() == expected[:3]
    assert said.err.count("skipped") == 2
