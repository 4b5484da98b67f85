"""perdure predict on every kind of input."""

from __future__ import annotations

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
