import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from perdure.config import DataConfig
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import load_domains, load_source
from perdure.data.sources.arrays import DigitsData, IdxData, NpzData

DRAWS = Rng(0)


def arrays(rows=20, test=10, classes=5, shape=(4, 6)):
    rng = np.random.default_rng(3)
    return {
        "x_train": rng.integers(0, 256, (rows, *shape), dtype=np.uint8),
        "y_train": np.arange(rows) % classes,
        "x_test": rng.integers(0, 256, (test, *shape), dtype=np.uint8),
        "y_test": np.arange(test) % classes,
    }


def npz(path: Path, **values) -> DataConfig:
    np.savez_compressed(path, **values)
    return NpzData(path=str(path))


def refused(config: DataConfig, *words: str, load=load_source) -> str:
    with pytest.raises(UserError) as caught:
        load(config, DRAWS)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for word in ("data.", *words):
        assert word in sentence
    return sentence


def test_digits_are_the_bundled_ones_split_by_class():
    source = load_source(DigitsData(), DRAWS)
    assert source.train.x.shape == (len(source.train), 1, 8, 8)
    assert source.train.x.dtype == torch.uint8
    assert len(source.train) + len(source.test) == 1797
    assert source.class_names == tuple("0123456789")
    bundled = load_digits()
    share = np.bincount(source.test.y.numpy()) / np.bincount(bundled.target)
    assert np.all(np.abs(share - 0.2) < 0.01)
    every = torch.cat([source.train.x, source.test.x]).flatten(1).numpy()
    expected = np.rint(bundled.data * 255 / 16).astype(np.uint8)
    assert sorted(map(bytes, every)) == sorted(map(bytes, expected))


def test_the_split_follows_the_seed_and_the_fraction():
    a, b, c = (load_source(DigitsData(), Rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(a.train.x, b.train.x)
    assert not torch.equal(a.train.x, c.train.x)
    half = load_source(DigitsData(test_fraction=0.5), DRAWS)
    assert abs(len(half.test) - 1797 / 2) < 10


def test_npz_gray_and_channels_last(tmp_path):
    values = arrays()
    source = load_source(npz(tmp_path / "gray.npz", **values), DRAWS)
    assert source.name == "gray"
    assert np.array_equal(source.train.x.numpy(), values["x_train"][:, None])
    assert source.test.y.tolist() == values["y_test"].tolist()
    assert source.train.y.dtype == torch.int64
    color = arrays(shape=(4, 6, 3))
    source = load_source(npz(tmp_path / "c.npz", **color), DRAWS)
    assert source.shape == (3, 4, 6)
    assert source.train.x[7, 2, 3, 5] == color["x_train"][7, 3, 5, 2]
    assert source.train.x.is_contiguous()


def test_npz_class_names(tmp_path):
    names = np.array(["a", "b", "c", "d", "e", "never seen"])
    source = load_source(npz(tmp_path / "n.npz", **arrays(), fine_names=names), DRAWS)
    assert source.class_names == tuple(names)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"y_train": None}, "y_train not found"),
        ({"y_train": np.arange(19) % 5}, "y_train has shape (19,) for 20 rows"),
        ({"y_train": np.arange(20) % 5 - 1}, "label -1"),
        ({"y_train": np.linspace(0, 4, 20)}, "float64 labels"),
        ({"y_train": np.array([*range(5)] * 3 + [255] * 5)}, "labels reach 255"),
        ({"y_test": np.full(10, 5)}, "label 5 is out of range"),
        ({"class_names": np.array(["a", "b"])}, "label 4 is out of range"),
        ({"x_train": np.zeros((20, 4, 6))}, "float32 rows of (4, 6), x_test uint8 rows"),
        ({"x_train": np.full((20, 4, 6), 300)}, "int64 values"),
        ({"x_train": np.zeros((20, 24), np.uint8)}, "rows of (24,)"),
        ({"x_train": np.zeros((20, 3, 6, 6), np.uint8)}, "shape (20, 3, 6, 6), in which channels"),
        ({"x_train": np.zeros((20, 2, 4, 6, 5), np.uint8)}, "shape (20, 2, 4, 6, 5)"),
        (
            {"x_train": np.zeros((0, 4, 6), np.uint8), "y_train": np.zeros(0, int)},
            "no rows to train on",
        ),
        ({"x_test": np.zeros((10, 5, 6), np.uint8)}, "x_test uint8 rows of (1, 5, 6)"),
        ({"class_names": np.array("a")}, "class_names has shape ()"),
        ({"x_train": np.array(3)}, "shape ()"),
        ({"x_train": np.array([{}] * 20)}, "something other than arrays of numbers"),
    ],
)
def test_invalid_npz_content_is_refused(tmp_path, change, word):
    values = {k: v for k, v in (arrays() | change).items() if v is not None}
    refused(npz(tmp_path / "bad.npz", **values), "bad.npz", word)


def test_unreadable_npz_files_are_refused(tmp_path):
    refused(NpzData(path=str(tmp_path / "none.npz")), "none.npz", "exists")
    good = tmp_path / "good.npz"
    npz(good, **arrays())
    data = good.read_bytes()
    for name, content in {
        "truncated": data[: len(data) // 2],
        "altered": data[:200] + bytes(100) + data[300:],
        "empty": b"",
        "text": b"this is no archive",
    }.items():
        path = tmp_path / f"{name}.npz"
        path.write_bytes(content)
        refused(NpzData(path=str(path)), f"{name}.npz")
    np.save(tmp_path / "single.npy", np.zeros(3))
    refused(NpzData(path=str(tmp_path / "single.npy")), "single array")


def domain_arrays():
    rng = np.random.default_rng(0)
    return {
        "x": rng.integers(0, 256, (40, 5, 5, 3), dtype=np.uint8),
        "y": np.arange(40) % 4,
        "domain": (np.arange(40) // 20).astype(np.uint8),
        "is_test": np.arange(40) % 5 == 0,
        "domain_names": np.array(["photo", "sketch"]),
        "class_names": np.array(["dog", "cat", "cow", "hen"]),
    }


def test_npz_with_domains(tmp_path):
    values = domain_arrays()
    config = npz(tmp_path / "d.npz", **values)
    photo, sketch = load_domains(config, DRAWS)
    assert (photo.name, sketch.name) == ("photo", "sketch")
    assert photo.class_names == sketch.class_names == ("dog", "cat", "cow", "hen")
    mine = (values["domain"] == 1) & values["is_test"]
    assert np.array_equal(sketch.test.x.numpy(), values["x"][mine].transpose(0, 3, 1, 2))
    assert sketch.test.y.tolist() == values["y"][mine].tolist()
    pooled = load_source(config, DRAWS)
    assert len(pooled.train) == len(photo.train) + len(sketch.train) == 32


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"domain": np.full(40, 2)}, "domain 2"),
        ({"is_test": np.ones(40, bool)}, "train on"),
        ({"is_test": np.zeros(39, bool)}, "is_test has shape"),
        ({"y": np.arange(40) % 5}, "label 4"),
    ],
)
def test_invalid_npz_domains_are_refused(tmp_path, change, word):
    refused(npz(tmp_path / "d.npz", **domain_arrays() | change), word, load=load_domains)


def test_a_source_without_domains_is_refused_as_domains(tmp_path):
    refused(npz(tmp_path / "p.npz", **arrays()), "domain", load=load_domains)
    refused(DigitsData(), "digits", "stream.domains", load=load_domains)


def test_limit_draws_training_rows_only():
    whole, part = (load_source(DigitsData(limit=n), DRAWS) for n in (None, 100))
    assert (len(part.train), len(part.test)) == (100, len(whole.test))
    known = set(map(bytes, whole.train.x.flatten(1).numpy()))
    assert all(bytes(row) in known for row in part.train.x.flatten(1).numpy())
    assert len(load_source(DigitsData(limit=10**6), DRAWS).train) == len(whole.train)
    assert len(part.train.y.unique()) > 5


def test_test_limit_draws_test_rows_only():
    whole, part = (load_source(DigitsData(test_limit=n), DRAWS) for n in (None, 50))
    assert torch.equal(part.train.x, whole.train.x)
    assert len(part.test) == 50
    taken, rows = (torch.cat([s.test.x.flatten(1), s.test.y[:, None]], 1) for s in (part, whole))
    assert {*map(tuple, taken.tolist())} <= {*map(tuple, rows.tolist())}
    assert len(load_source(DigitsData(test_limit=10**6), DRAWS).test) == len(whole.test)


def test_limit_follows_the_seed(tmp_path):
    config = npz(tmp_path / "a.npz", **arrays()).model_copy(update={"limit": 8})
    drawn = {load_source(config, Rng(seed)).train.x.numpy().tobytes() for seed in (0, 0, 1, 2)}
    assert len(drawn) == 3


def test_size_and_channels_of_any_source(caplog):
    caplog.set_level("INFO")
    source = load_source(DigitsData(size=12, channels=3), DRAWS)
    assert source.shape == (3, 12, 12)
    assert torch.equal(source.train.x[:, 0], source.train.x[:, 2])
    assert "8x8 with 1 channel resized to 12x12 with 3 channels" in caplog.text


def idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def idx_folder(folder: Path, sign="-", end="") -> dict[str, np.ndarray]:
    values = arrays()
    for part, key in (("train", "train"), ("t10k", "test")):
        idx(folder / f"{part}-images{sign}idx3-ubyte{end}", values[f"x_{key}"])
        idx(folder / f"{part}-labels{sign}idx1-ubyte{end}", values[f"y_{key}"])
    return values


@pytest.mark.parametrize("sign", ["-", "."])
@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_files_are_found_under_all_usual_names(tmp_path, sign, end):
    values = idx_folder(tmp_path, sign, end)
    source = load_source(IdxData(path=str(tmp_path)), DRAWS)
    assert np.array_equal(source.train.x.numpy(), values["x_train"][:, None])
    assert np.array_equal(source.test.x.numpy(), values["x_test"][:, None])
    assert source.train.y.tolist() == values["y_train"].tolist()
    assert len(source.class_names) == 5


def test_invalid_idx_files_are_refused(tmp_path):
    config = IdxData(path=str(tmp_path))
    refused(IdxData(path=str(tmp_path / "none")), "none")
    refused(config, "train-images-idx3-ubyte")
    idx_folder(tmp_path)
    path = tmp_path / "t10k-labels-idx1-ubyte"
    good = path.read_bytes()
    for content, word in {
        good[:-1]: "9 bytes for shape (10,)",
        good[:6]: "within its header",
        b"\x01" + good[1:]: "begin like an idx file",
        good[:-1] + b"\xff": "label 255",
    }.items():
        path.write_bytes(content)
        refused(config, word)
    path.unlink()
    refused(config, "t10k-labels-idx1-ubyte")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(good)[:-10])
    refused(config, "cannot be read")
