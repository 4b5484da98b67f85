"""Data sets by name: in a folder, in the cache, from Hugging Face's datasets; or one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import official_files as files
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import load_domains, load_source
from perdure.data.named import load as named
from perdure.data.named.sets import DATA_SETS, Hub
from perdure.data.sources import huggingface as hub_connection


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of data, an empty cache, and no network."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("PERDURE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("PERDURE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub_connection, "is_reachable", lambda url: False)
    return tmp_path / "data"


def config(name: str, **values):
    return parse({"data": {"source": name, **values}}).data


def load(name: str, **values):
    return load_source(config(name, **values), Rng(0))


def refused(name: str, *words: str, **values) -> str:
    with pytest.raises(UserError) as caught:
        load(name, **values)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_npz(path: Path, side: int = 6, rows: int = 20) -> np.ndarray:
    x = np.random.default_rng(side).integers(0, 256, (rows, side, side, 3), dtype=np.uint8)
    y = np.arange(rows) % 4
    np.savez(path, x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    return x


def test_a_file_of_the_name_is_read(folders: Path) -> None:
    x = write_npz(folders / "cifar100.npz")
    source = load("cifar100", limit=8)
    assert (source.name, len(source.train), source.shape) == ("cifar100", 8, (3, 6, 6))
    assert np.array_equal(source.test.x.numpy(), x[:4].transpose(0, 3, 1, 2))


def test_a_file_of_the_size_comes_first(folders: Path) -> None:
    write_npz(folders / "pacs.npz", 6)
    write_npz(folders / "pacs_4.npz", 4, rows=8)
    assert len(load("pacs", size=4).train) == 8
    assert len(load("pacs", size=5).train) == 20


def test_names_with_underscores_are_found(folders: Path) -> None:
    write_npz(folders / "emnist_letters.npz")
    assert load("emnist-letters").shape == (3, 6, 6)


def test_without_the_variable_the_folder_data_is_read(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_npz(folders / "usps.npz")
    monkeypatch.delenv("PERDURE_DATA")
    monkeypatch.chdir(folders.parent)
    assert load("usps").shape == (3, 6, 6)


def test_a_given_path_comes_before_the_folder(folders: Path, tmp_path: Path) -> None:
    write_npz(folders / "mnist.npz", 6)
    write_npz(tmp_path / "mine.npz", 5)
    assert load("mnist", path=str(tmp_path / "mine.npz")).shape == (3, 5, 5)
    refused("mnist", "data.path", "gone.npz", path="gone.npz")


def test_official_files_are_converted_once(folders: Path, tmp_path: Path) -> None:
    expected = files.write_mnist(folders / "MNIST" / "raw")
    source = load("mnist")
    assert np.array_equal(source.train.x.numpy()[:, 0], expected["x_train"])
    (cached,) = (tmp_path / "cache").iterdir()
    for file in (folders / "MNIST" / "raw").iterdir():
        file.unlink()
    again = load("mnist")
    assert np.array_equal(again.train.x, source.train.x)
    assert again.class_names == tuple("0123456789")
    assert named.find_set("mnist") == cached


def test_a_damaged_file_in_the_cache_is_made_again(
    folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = files.write_mnist(folders / "mnist", end="")
    load("mnist")
    (cached,) = (tmp_path / "cache").iterdir()
    cached.write_bytes(cached.read_bytes()[:-100])
    assert np.array_equal(load("mnist").train.x.numpy()[:, 0], expected["x_train"])
    assert "does not match its hash" in caplog.text


def test_damaged_official_files_are_refused(folders: Path, tmp_path: Path) -> None:
    (folders / "train_32x32.mat").write_bytes(b"no")
    refused("svhn", "data.path", "train_32x32.mat")
    assert not list((tmp_path / "cache").glob("*"))


def test_domains_and_their_names(folders: Path) -> None:
    write_npz(folders / "mnist.npz")
    write_npz(folders / "usps.npz")
    from perdure.training.experiment import build_experiment

    domains = [{"source": "mnist"}, {"source": "usps"}]
    values = {"stream": {"kind": "domains", "tasks": 2, "domains": domains}}
    stream = build_experiment(parse(values | {"clients": {"count": 2}})).stream
    assert [task.name for task in stream.tasks] == ["mnist", "usps"]


@pytest.mark.parametrize("is_set", [True, False])
def test_what_cannot_be_had_is_one_sentence(
    is_set: bool, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_set:
        monkeypatch.delenv("PERDURE_DATA")
        monkeypatch.chdir(tmp_path / "data")
    put = f"put cifar10.npz in {folders}" if is_set else "set PERDURE_DATA to a folder with cifar10"
    refused("cifar10", "data.source: cifar10 could not be loaded", put, "perdure data make cifar10",
            "cifar-10-binary.tar.gz", "does not answer")  # fmt: skip
    refused("vlcs", "not on Hugging Face's hub", "torchvision does not have it", "vlcs.npz")
    refused("clinc150", "clinc150.jsonl.gz", "data_full.json")
    assert not (tmp_path / "cache").exists()


def on_hub(monkeypatch: pytest.MonkeyPatch, name: str, hub: Hub) -> None:
    monkeypatch.setitem(DATA_SETS, name, replace(DATA_SETS[name], hub=hub))


def test_images_of_the_hub_are_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    x = files.color(10)
    features = datasets.Features(
        {"img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["b", "a"])}
    )
    rows = {"img": list(x), "fine_label": [0, 1] * 5}
    data = datasets.Dataset.from_dict(rows, features=features)
    parts = datasets.DatasetDict(train=data, test=data.select(range(4)))
    parts.save_to_disk(str(tmp_path / "hub"))
    on_hub(monkeypatch, "cifar100", Hub(str(tmp_path / "hub"), image="img", label="fine_label"))
    source = load("cifar100")
    assert np.array_equal(source.train.x.numpy(), x.transpose(0, 3, 1, 2))
    assert source.test.y.tolist() == [0, 1, 0, 1]
    assert source.class_names == ("b", "a")
    on_hub(monkeypatch, "cifar100", Hub(str(tmp_path / "gone")))
    assert np.array_equal(load("cifar100").train.x, source.train.x)


def test_domains_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    x, domain = files.color(40), [0, 1] * 20
    label = [i // 2 % 2 for i in range(40)]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "domain": datasets.ClassLabel(names=["photo", "sketch"]),
            "label": datasets.ClassLabel(names=["dog", "cat"]),
        }
    )
    rows = {"image": list(x), "domain": domain, "label": label}
    data = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=data).save_to_disk(str(tmp_path / "hub"))
    on_hub(monkeypatch, "pacs", Hub(str(tmp_path / "hub"), domain="domain"))
    photo, sketch = load_domains(config("pacs", size=16), Rng(3))
    assert (photo.name, sketch.name) == ("photo", "sketch")
    assert len(photo.train) + len(photo.test) == 20
    assert len(photo.test) + len(sketch.test) == 8
    assert photo.shape == (3, 16, 16)
    assert next((tmp_path / "cache").iterdir()).name.startswith("pacs_16-")


def test_texts_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"text": ["a b", "c", "d"], "intent": ["pay", "oos", "card"]}
    data = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict(train=data, test=data).save_to_disk(str(tmp_path / "hub"))
    hub = Hub(str(tmp_path / "hub"), label="intent", text="text", without="oos")
    on_hub(monkeypatch, "clinc150", hub)
    source = load("clinc150", features=8)
    assert (source.train.texts, source.test.texts) == (["a b", "d"], ["a b", "d"])
    assert source.class_names == ("card", "pay")


def test_the_hub_is_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    seen = []

    def load_dataset(*words: str) -> None:
        seen.append((words, constants.HF_HUB_OFFLINE))
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    refused("svhn", "ufldl-stanford/svhn: Hugging Face's hub does not answer")
    assert seen == [(("ufldl-stanford/svhn", "cropped_digits"), True)]
    assert constants.HF_HUB_OFFLINE is False
    refused("huggingface", "data.path", "does not answer", path="some/set")


def test_a_server_that_answers_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    monkeypatch.undo()
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # answers 501 to everything
    thread = Thread(target=server.handle_request)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    assert hub_connection.is_reachable(url)
    thread.join()
    server.server_close()
    assert not hub_connection.is_reachable(url)
    assert not hub_connection.is_reachable("no address")


def test_every_name_has_what_a_user_needs() -> None:
    from perdure.data.named.official import READERS

    for name, data_set in DATA_SETS.items():
        assert name == name.lower()
        assert all((data_set.title, data_set.license, data_set.contents, data_set.official.files))
        assert data_set.official.url.startswith("http")
        assert data_set.official.format in (*READERS, "classes", "domains")
        assert bool(data_set.official.marks) == (data_set.official.format in READERS)


def test_saved_configs_and_settings_keep_the_name(tmp_path: Path) -> None:
    from perdure.config import dump, load, override, read_saved, yaml_value

    saved = dump(parse({"data": {"source": "cifar100", "size": 8}}))
    assert read_saved(yaml_value(saved)).data.source == "cifar100"
    settings = ["data.source=npz", "data.path=a.npz"]
    changed = override({"data": {"source": "cifar100", "features": 3, "size": 8}}, settings)
    assert changed["data"] == {"source": "npz", "path": "a.npz", "size": 8}
    (tmp_path / "a.yaml").write_text(json.dumps({"data": {"source": "cifar1000"}}))
    with pytest.raises(UserError, match=r"data\.source: must be .* cifar100, .* got 'cifar1000'"):
        load(tmp_path / "a.yaml")
