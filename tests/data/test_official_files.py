"""Official files become npz files and JSON lines; damaged and malicious ones are refused."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import official_files as files
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import load_domains, load_source
from perdure.data.named.load import make_set
from perdure.data.named.official import read_pickle

PYTHON, PYTHON_ARRAYS = files.cifar_python()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PERDURE_DATA", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "official").mkdir()
    return tmp_path / "official"


def made(name: str, folder: Path, tmp_path: Path, **options) -> dict[str, np.ndarray]:
    out = make_set(name, folder, tmp_path / "out.npz", **options)
    with np.load(out) as arrays:
        return dict(arrays)


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for key, array in expected.items():
        assert np.array_equal(found[key], array), key


def refused(name: str, folder: Path, tmp_path: Path, *words: str, **options) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        make_set(name, folder, tmp_path / "out.npz", **options)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written


@pytest.mark.parametrize("end", [".gz", ""])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "kmnist"])
def test_idx_files(name: str, end: str, folder: Path, tmp_path: Path) -> None:
    expected = files.write_mnist(folder, end=end)
    same(made(name, folder, tmp_path), expected)


def test_idx_files_where_torchvision_puts_them(folder: Path, tmp_path: Path) -> None:
    expected = files.write_mnist(folder / "KMNIST" / "raw")
    files.write_mnist(folder / "MNIST" / "raw")
    same(made("kmnist", folder, tmp_path), expected)


def test_letters_stand_upright_and_begin_at_0(folder: Path, tmp_path: Path) -> None:
    files.write_mnist(folder, "emnist-digits-", "test")
    expected = files.write_mnist(folder, "emnist-letters-", "test", first=1)
    found = made("emnist-letters", folder, tmp_path)
    assert np.array_equal(found["x_train"][3], expected["x_train"][3].T)
    assert np.array_equal(found["y_test"], expected["y_test"] - 1)
    assert found["class_names"][0] == "a"


def test_idx_files_of_another_set_are_not_taken(folder: Path, tmp_path: Path) -> None:
    files.write_mnist(folder, "emnist-letters-", "test", first=1)
    refused("mnist", folder, tmp_path, "--from", "train-images", "not there")


def test_a_truncated_idx_file_is_refused(folder: Path, tmp_path: Path) -> None:
    files.write_mnist(folder, end="")
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-10])
    refused("mnist", folder, tmp_path, "--from", "train-images-idx3-ubyte", "bytes for shape")
    (folder / "t10k-labels-idx1-ubyte").unlink()
    path.unlink()
    files.write_idx(path, files.gray(files.TRAIN))
    refused("mnist", folder, tmp_path, "t10k-labels is missing")


def test_labels_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    files.write_mnist(folder, "emnist-letters-", "test", first=0)
    refused("emnist-letters", folder, tmp_path, "label -1")


@pytest.mark.parametrize("packed", [True, False])
def test_cifar_in_binary(packed: bool, folder: Path, tmp_path: Path) -> None:
    contents, expected = files.cifar100_binary()
    if packed:
        files.pack(folder / "cifar-100-binary.tar.gz", contents, "cifar-100-binary")
    else:
        (folder / "cifar-100-binary").mkdir()
        for name, data in contents.items():
            (folder / "cifar-100-binary" / name).write_bytes(data)
    found = made("cifar100", folder, tmp_path)
    same(found, expected)
    assert found["class_names"].tolist() == [f"class{i}" for i in range(10)]


def test_cifar_10_in_batches(folder: Path, tmp_path: Path) -> None:
    x, y = files.color(12), files.labels(12)
    records = [files.binary_record(image, label) for image, label in zip(x, y, strict=True)]
    for number in range(5):
        part = b"".join(records[2 * number : 2 * number + 2])
        (folder / f"data_batch_{number + 1}.bin").write_bytes(part)
    (folder / "test_batch.bin").write_bytes(b"".join(records[10:]))
    found = made("cifar10", folder, tmp_path)
    same(found, {"x_train": x[:10], "y_train": y[:10], "x_test": x[10:], "y_test": y[10:]})
    assert found["class_names"][2] == "bird"


def test_damaged_binary_files_are_refused(folder: Path, tmp_path: Path) -> None:
    contents, _ = files.cifar100_binary()
    archive = folder / "cifar-100-binary.tar.gz"
    short = contents | {"train.bin": contents["train.bin"][:-1]}
    files.pack(archive, short, "cifar-100-binary")
    refused("cifar100", folder, tmp_path, "train.bin", "truncated")
    files.pack(archive, {"train.bin": contents["train.bin"]}, "cifar-100-binary")
    refused("cifar100", folder, tmp_path, "test.bin is missing")
    files.pack(archive, contents, "x")
    archive.write_bytes(archive.read_bytes()[:5000])
    refused("cifar100", folder, tmp_path, "cannot be read")
    archive.write_bytes(b"<html>not found</html>")
    refused("cifar100", folder, tmp_path, "cannot be read")


def test_cifar_in_python_2_pickles(folder: Path, tmp_path: Path) -> None:
    plain = pickle.loads(PYTHON["train"], encoding="bytes")  # the files are real pickles
    assert plain[b"data"].shape == (files.TRAIN, 3072)
    files.pack(folder / "cifar-100-python.tar.gz", PYTHON, "cifar-100-python")
    found = made("cifar100", folder, tmp_path)
    same(found, PYTHON_ARRAYS)
    assert found["class_names"][9] == "class9"


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_runs_no_code(folder: Path, tmp_path: Path) -> None:
    harm = pickle.dumps({b"data": Harm(tmp_path / "harm"), b"fine_labels": [0]}, protocol=4)
    assert b"mkdir" in harm
    files.pack(folder / "cifar-100-python.tar.gz", PYTHON | {"train": harm}, "c")
    refused("cifar100", folder, tmp_path, "train", "mkdir", "which is code")
    assert not (tmp_path / "harm").exists()


def array_of(kind: bytes, shape: bytes, data: bytes) -> bytes:
    """A dictionary with an array of a type, a shape and some bytes."""
    dtype = files.DTYPE.replace(b"u1", kind)
    state = b"(K\x01" + shape + dtype + b"\x89" + files.python2_string(data) + b"tb"
    return files.python2_dict(data=files.RECONSTRUCT + state)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (PYTHON["train"][:-50], "not a pickle"),
        (b"", "not a pickle"),
        (b"\x80\x02](K\x01e.", "no dictionary"),
        (array_of(b"O8", b"K\x01\x85", b"A" * 8), "something other than bytes"),
        (array_of(b"u1", b"J\xff\xff\xff\x7f\x85", b"AA"), "2 bytes"),
        (b"\x80\x02cbuiltins\neval\nU\x041+1\x85R.", "eval"),
        (b"\x80\x02" + b"]" * 100 + b"P0\n.", "not a pickle"),
        (b"\x80\x02}r\xff\xff\xff\xffcos\nsystem\n.", "os.system"),
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".", "not a pickle"),
    ],
    ids=["cut", "empty", "list", "objects", "shape", "eval", "persistent", "memo", "huge"],
)  # fmt: skip
def test_bad_pickles_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        read_pickle("train", data)
    assert "train" in str(caught.value)


def test_a_pickle_cannot_change_how_the_next_is_read() -> None:
    """It would set an attribute of the class that stands for those of NumPy."""
    spoiled = b"\x80\x02cnumpy\nndarray\n(N}U\x0c__setstate__K\x01stb."
    with pytest.raises(ValueError, match="evil"):
        read_pickle("evil", spoiled)
    assert read_pickle("train", PYTHON["train"])[b"data"].shape == (files.TRAIN, 3072)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_altered_pickles_are_values_or_refused(place: int, data: bytes) -> None:
    base = PYTHON["meta"]
    place %= len(base)
    altered = base[:place] + data + base[place + len(data) :]
    with suppress(ValueError):
        assert isinstance(read_pickle("meta", altered), dict)


def test_usps_and_svhn(folder: Path, tmp_path: Path) -> None:
    expected = files.write_usps(folder)
    same(made("usps", folder, tmp_path), expected)
    from scipy.io import savemat

    x, y = files.color(12), files.labels(12)
    for part in ("train", "test"):
        pixels = x.transpose(1, 2, 3, 0)
        savemat(folder / f"{part}_32x32.mat", {"X": pixels, "y": np.where(y, y, 10)[:, None]})
    (tmp_path / "out.npz").unlink()
    same(made("svhn", folder, tmp_path), {"x_train": x, "y_train": y, "x_test": x})
    path = folder / "test_32x32.mat"
    path.write_bytes(path.read_bytes()[:200])
    (tmp_path / "out.npz").unlink()
    refused("svhn", folder, tmp_path, "test_32x32.mat")


def test_listed_images(folder: Path, tmp_path: Path) -> None:
    x = files.color(6)
    for part in ("train", "test"):
        (folder / f"mnist_m_{part}").mkdir()
        for number, image in enumerate(x):
            Image.fromarray(image).save(folder / f"mnist_m_{part}" / f"{number}.png")
        lines = "".join(f"{number}.png {number % 2}\n" for number in range(6))
        (folder / f"mnist_m_{part}_labels.txt").write_text(lines)
    same(made("mnist-m", folder, tmp_path), {"x_train": x, "y_test": np.arange(6) % 2})
    (folder / "mnist_m_test_labels.txt").write_text("../../secret.png 1\n")
    (tmp_path / "out.npz").unlink()
    refused("mnist-m", folder, tmp_path, "mnist_m_test_labels.txt")


def write_images(folder: Path, sides: tuple[int, ...]) -> None:
    folder.mkdir(parents=True)
    for number, side in enumerate(sides):
        image = files.gray(1, side)[0]
        Image.fromarray(np.repeat(image[:, :, None], 3, 2)).save(folder / f"{number}.png")


def test_class_and_domain_folders(folder: Path, tmp_path: Path) -> None:
    for letter in "AB":
        write_images(folder / "notMNIST_small" / letter, (28,) * 5)
    found = made("notmnist", folder, tmp_path)
    assert found["x_train"].shape == (8, 28, 28, 3)
    assert found["class_names"].tolist() == ["A", "B"]
    for domain in ("photo", "sketch"):
        for kind in ("dog", "cat"):
            write_images(folder / domain / kind, (9, 11, 9, 13, 9))
    (tmp_path / "out.npz").unlink()
    (folder / "notMNIST_small").rename(tmp_path / "letters")
    refused("pacs", folder, tmp_path, "--size", "differ in size")
    domains = made("pacs", folder, tmp_path, size=8)
    assert domains["x"].shape == (20, 8, 8, 3)
    assert domains["domain_names"].tolist() == ["photo", "sketch"]
    assert domains["is_test"].sum() == 4
    config = parse({"data": {"source": "pacs", "path": str(tmp_path / "out.npz")}}).data
    assert [source.name for source in load_domains(config, Rng(0))] == ["photo", "sketch"]


def test_texts(folder: Path, tmp_path: Path) -> None:
    splits = {"train": [["a b", "x"], ["c", "y"]], "val": [["v", "x"]], "test": [["d", "y"]]}
    (folder / "data_full.json").write_text(json.dumps(splits | {"oos_test": [["e", "oos"]]}))
    out = make_set("clinc150", folder, tmp_path / "clinc.jsonl.gz")
    rows = [json.loads(line) for line in gzip.decompress(out.read_bytes()).splitlines()]
    assert [(r["text"], r["split"]) for r in rows][::3] == [("a b", "train"), ("d", "test")]
    (folder / "train.csv").write_text('text,category\n"one, two",pay\nthree,card\n')
    (folder / "test.csv").write_text("text,category\nfour,pay\n")
    path = make_set("banking77", folder)
    config = parse({"data": {"source": "banking77", "path": str(path), "features": 16}}).data
    source = load_source(config, Rng(0))
    assert (source.train.texts, source.test.texts) == (["one, two", "three"], ["four"])
    assert source.class_names == ("card", "pay")
    review = "<review>\n<review_text>\n{}\n</review_text>\n</review>\n"
    for domain in ("books", "dvd"):
        (folder / domain).mkdir()
        for kind in ("positive", "negative"):
            text = "".join(review.format(f"{kind} {i} é") for i in range(5))
            (folder / domain / f"{kind}.review").write_text(text, encoding="latin-1")
    config = parse({"data": {"source": "amazon", "path": str(make_set("amazon", folder))}}).data
    books, dvd = load_domains(config, Rng(0))
    assert (books.name, dvd.name, len(books.train)) == ("books", "dvd", 8)
    assert "é" in books.train.texts[0]


def test_options_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    refused("mnits", folder, tmp_path, "NAME", "cifar100", "mnits")
    refused("mnist", tmp_path / "gone", tmp_path, "--from", "exists")
    files.write_mnist(folder)
    refused("mnist", folder, tmp_path, "--size", size=8)
    (tmp_path / "out.npz").touch()
    refused("mnist", folder, tmp_path, "--out", "new file")


def test_a_made_file_is_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    files.write_mnist(folder)
    first, again = make_set("mnist", folder), make_set("mnist", folder)
    assert first == again
    assert [path.name for path in first.parent.iterdir()] == [first.name]
