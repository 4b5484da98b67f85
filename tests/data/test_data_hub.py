import sys

import numpy as np
import pytest

from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import load_source
from perdure.data.sources.huggingface import HuggingfaceData

DRAWS = Rng(0)


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("datasets")


def image_set(hub, rows=10, names=("x", "y")):
    rng = np.random.default_rng(0)
    features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=list(names))})
    x = rng.integers(0, 256, (rows, 6, 4), dtype=np.uint8)
    values = {"image": list(x), "label": [i % len(names) for i in range(rows)]}
    return x, hub.Dataset.from_dict(values, features=features)


def config(path, **options):
    return HuggingfaceData(path=str(path), **options)


def refused(settings, *words):
    with pytest.raises(UserError) as caught:
        load_source(settings, DRAWS)
    for word in words:
        assert word in str(caught.value)


def test_image_datasets_keep_their_splits(hub, tmp_path):
    x, data = image_set(hub)
    hub.DatasetDict(train=data, test=data.select(range(4))).save_to_disk(str(tmp_path / "d"))
    source = load_source(config(tmp_path / "d"), DRAWS)
    assert np.array_equal(source.train.x.numpy(), x[:, None])
    assert np.array_equal(source.test.x.numpy(), x[:4, None])
    assert source.train.y.tolist() == [0, 1] * 5
    assert source.class_names == ("x", "y")


def test_a_dataset_without_a_test_split_is_split_by_the_seed(hub, tmp_path):
    _, data = image_set(hub)
    data.save_to_disk(str(tmp_path / "d"))
    source = load_source(config(tmp_path / "d"), DRAWS)
    assert (len(source.train), len(source.test)) == (8, 2)
    assert source.test.y.tolist() in ([0, 1], [1, 0])


def test_texts_keep_the_order_of_their_names(hub, tmp_path):
    features = hub.Features(
        {"words": hub.Value("string"), "label": hub.ClassLabel(names=["z", "a"])}
    )
    values = {"words": ["one two", "three"], "label": [0, 1]}
    data = hub.Dataset.from_dict(values, features=features)
    hub.DatasetDict(train=data, validation=data).save_to_disk(str(tmp_path / "d"))
    source = load_source(config(tmp_path / "d", text_column="words", features=32), DRAWS)
    assert source.class_names == ("z", "a")
    assert source.train.y.tolist() == [0, 1]
    assert source.train.x.sum(1).tolist() == [2, 1]


def test_a_local_folder_of_files_is_loaded(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csv"
    folder.mkdir()
    for part in ("train", "test"):
        (folder / f"{part}.csv").write_text("text,label\nred green,0\nblue,1\n")
    source = load_source(config(folder, features=16), DRAWS)
    assert source.class_names == ("0", "1")
    assert (source.train.texts, source.test.texts) == (["red green", "blue"], ["red green", "blue"])


def test_invalid_datasets_are_refused(hub, tmp_path):
    _, data = image_set(hub)
    data.rename_column("image", "picture").save_to_disk(str(tmp_path / "d"))
    refused(config(tmp_path / "d"), "data.image_column", "picture, label")
    refused(config(tmp_path / "d", label_column="kind"), "data.label_column", "kind")
    found = load_source(config(tmp_path / "d", image_column="picture"), DRAWS)
    assert found.shape == (1, 6, 4)
    (tmp_path / "empty").mkdir()
    refused(config(tmp_path / "empty"), "data.path", "empty")


def test_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(config("mnist"), "data.source", "perdure[huggingface]")


def test_a_subset_is_loaded_by_name(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    folder.mkdir()
    parts = "".join(f"- config_name: {n}\n  data_files: {n}.jsonl\n" for n in ("films", "books"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    for name in ("films", "books"):
        lines = [f'{{"text": "{name} {i}", "label": "{name}-{i % 2}"}}\n' for i in range(8)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    source = load_source(config(folder, subset="books"), DRAWS)
    assert source.class_names == ("books-0", "books-1")
    refused(config(folder, subset="songs"), "data.path", "songs")


def test_a_saved_data_set_has_no_subsets(hub, tmp_path):
    image_set(hub)[1].save_to_disk(tmp_path / "d")
    refused(config(tmp_path / "d", subset="books"), "data.subset: must be null", "'books'")
