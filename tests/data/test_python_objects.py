"""Python objects become sources: what they hold is what a user put in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.core.trees import decode, encode
from perdure.data.partition_kinds import ColumnPartition
from perdure.data.python_objects import (
    as_source,
    as_sources,
    fingerprint,
    read_object,
    rows_from_tree,
    rows_to_tree,
)
from perdure.data.source import ConfigLocation
from perdure.data.sources.custom import CustomData

X = np.random.default_rng(0).normal(size=(20, 3))
NAMES = np.array(["cat", "dog"])[np.arange(20) % 2]
NUMBERS = np.arange(20) % 2
IMAGES = np.random.default_rng(1).integers(0, 256, (20, 6, 5, 3), dtype=np.uint8)


class Pairs(Dataset[Any]):
    """Examples of a list, with names of classes."""

    classes = ("cat", "dog")

    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


def keys(**values: Any) -> CustomData:
    return CustomData(source="given:test", **values)


def all_rows(source: Any) -> Any:
    """Return training and test inputs together, sorted by their first value."""
    x = torch.cat([source.train.x, source.test.x]).flatten(1)
    return x[x[:, 0].argsort()].numpy()


@pytest.mark.parametrize("labels", [NAMES, NAMES.tolist(), NAMES.astype(object)])
@pytest.mark.parametrize("x", [X, X.tolist(), torch.from_numpy(X)])
def test_a_tuple_of_inputs_and_labels(x: Any, labels: Any) -> None:
    source = as_source((x, labels))
    assert source.class_names == ("cat", "dog")
    assert np.array_equal(all_rows(source), X[X[:, 0].argsort()].astype(np.float32))
    row = np.flatnonzero(X[:, 0].astype(np.float32) == source.train.x[0, 0].item())[0]
    assert source.class_names[source.train.y[0]] == NAMES[row]
    assert (len(source.train), len(source.test)) == (16, 4)


def test_labels_may_be_numbers_tensors_or_truth_values() -> None:
    for labels in (NUMBERS, torch.from_numpy(NUMBERS), NUMBERS[:, None], NUMBERS == 1):
        assert as_source((X, labels)).class_names == ("0", "1")


@pytest.mark.parametrize(
    "data",
    [
        {"x_train": X[:15], "y_train": NAMES[:15], "x_test": X[15:], "y_test": NAMES[15:]},
        ((X[:15], NAMES[:15]), (X[15:], NAMES[15:])),
        {"train": (X[:15], NAMES[:15]), "test": (X[15:], NAMES[15:])},
        {"x": X, "y": NAMES, "is_test": np.arange(20) >= 15},
        tuple(
            Pairs([(torch.tensor(X[i]), int(NUMBERS[i])) for i in part])
            for part in (range(15), range(15, 20))
        ),
    ],
)
def test_test_rows_are_those_that_are_given(data: Any) -> None:
    source = as_source(data)
    assert np.array_equal(source.test.x.numpy(), X[15:].astype(np.float32))
    assert source.class_names == ("cat", "dog")
    assert source.test.y.tolist() == NUMBERS[15:].tolist()


def test_images_in_tensors_have_their_channels_first_and_in_arrays_last() -> None:
    first = IMAGES.transpose(0, 3, 1, 2)
    for x in (IMAGES, torch.from_numpy(first)):
        source = as_source((x, NUMBERS))
        assert (source.shape, source.train.x.dtype) == ((3, 6, 5), torch.uint8)
        wanted = first.reshape(20, -1)
        assert {tuple(row) for row in all_rows(source)} == {tuple(row) for row in wanted}
    floats = torch.rand(20, 5, 1, 7)  # neither gray nor color
    assert as_source((floats, NUMBERS)).shape == (5, 1, 7)


def test_a_dataset_of_tensors_images_arrays_or_texts() -> None:
    tensors = TensorDataset(torch.from_numpy(X), torch.from_numpy(NUMBERS))
    assert as_source(tensors).class_names == ("0", "1")
    pictures = Pairs([(Image.fromarray(IMAGES[i]), int(NUMBERS[i])) for i in range(20)])
    source = as_source(pictures)
    assert (source.shape, source.class_names) == ((3, 6, 5), ("cat", "dog"))
    assert as_source(Subset(pictures, range(10))).class_names == ("cat", "dog")
    assert as_source(Pairs([(IMAGES[i], NAMES[i]) for i in range(20)])).shape == (3, 6, 5)
    texts = as_source(Pairs([("a b", 0), ("c d", 1)] * 4), keys(features=8))
    assert texts.train.texts is not None
    assert texts.test.texts is not None
    assert sorted({*texts.train.texts, *texts.test.texts}) == ["a b", "c d"]


def test_images_of_several_sizes_need_a_size() -> None:
    pictures = [Image.fromarray(IMAGES[i]).resize((5 + i, 6)) for i in range(4)]
    data = Pairs([(image, i % 2) for i, image in enumerate(pictures)])
    with pytest.raises(UserError, match=r"^data.size: must be a number of pixels"):
        as_source(data)
    assert as_source(data, keys(size=8)).shape == (3, 8, 8)


def test_a_hugging_face_dataset_keeps_its_names() -> None:
    hub = pytest.importorskip("datasets")
    features = hub.Features({"image": hub.Image(), "label": hub.ClassLabel(names=["dog", "cat"])})
    values = {"image": list(IMAGES), "label": NUMBERS.tolist()}
    data = hub.Dataset.from_dict(values, features=features)
    source = as_source(data)
    assert (source.class_names, source.shape) == (("dog", "cat"), (3, 6, 5))
    both = hub.DatasetDict(train=data.select(range(15)), test=data.select(range(15, 20)))
    assert len(as_source(both).test) == 5
    with pytest.raises(UserError, match=r"^data.label_column: must be a column of the dataset: im"):
        as_source(data, keys(label_column="kind"))


def test_a_frame_is_read_like_a_table() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    frame["kind"], frame["part"] = NAMES, ["train"] * 15 + ["test"] * 5
    frame["site"] = pandas.Series(np.arange(20) % 4).astype(str)
    config = keys(label_column="kind", split_column="part", domain_column="site")
    source = as_source(frame, config)
    assert source.feature_names == ("a", "b", "c")
    assert np.array_equal(source.test.x.numpy(), X[15:].astype(np.float32))
    assert [s.name for s in as_sources(frame, config)] == ["0", "1", "2", "3"]
    location = ConfigLocation(clients=ColumnPartition(name="site"))
    assert as_source(frame, config, location=location).client_names == ("0", "1", "2", "3")
    words = pandas.DataFrame({"text": ["red", "green"] * 4, "label": [1, 3] * 4})
    assert as_source(words).train.texts is not None
    assert as_source(words).class_names == ("1", "3")


def test_parts_and_domains_become_one_source_each() -> None:
    parts = {"north": (X, NAMES), "south": (X[:10], NAMES[:10])}
    assert [source.name for source in as_sources(parts)] == ["north", "south"]
    assert [source.name for source in as_sources(list(parts.values()))] == ["task 1", "task 2"]
    sites = np.array(["north", "south"])[np.arange(20) // 10]
    domains = as_sources({"x": X, "y": NAMES, "domain": sites})
    assert [(s.name, len(s.train) + len(s.test)) for s in domains] == [("north", 10), ("south", 10)]


class Endless(IterableDataset[Any]):
    """Examples without a length."""

    def __iter__(self) -> Any:
        """Yield nothing."""
        return iter(())


UNEVEN = Pairs([(torch.zeros(3, 4 + i), i % 2) for i in range(4)])
GAP = np.where(np.arange(60).reshape(20, 3) == 31, np.nan, X)
TABLE = """
data: must be valid examples (example 1 has the shape (3, 5), example 0 (3, 4)), got Pairs
data: must be valid examples (x contains a value in row 10 that is NaN, infinite or too large), \
got tuple
data: must be valid examples (y has shape (19,) for 20 rows, not one label per row), got tuple
data: must be valid examples (y contains the label 'dog', not one of cat), got dict
data: must be valid examples (y_train not found among x_test, y_test, x_train), got dict
data: must be valid examples (example 0 is Tensor, not a pair of an input and a label), got Pairs
data: must be valid examples (it is read from beginning to end; use a map-style Dataset), got DataL
data: must be valid examples (it is read from beginning to end; use a map-style Dataset), got Endle
data: must be valid examples (Pairs has no examples), got Pairs
data: must be a tuple (x, y), a dict of arrays, a torch Dataset, a Hugging Face Dataset or a pandas
data: must be a tuple (x, y), a dict of arrays, a torch Dataset, a Hugging Face Dataset or a pandas
data: must be valid examples (x_train has float32 rows of (3,), x_test float32 rows of (2,)), got
data: must be valid examples (y contains float64 labels, not integers), got tuple
""".strip().splitlines()
BAD = [
    UNEVEN,
    (GAP, NUMBERS),
    (X, NUMBERS[:19]),
    {"x": X, "y": NAMES, "is_test": NAMES == "dog"},
    {"x_test": X, "y_test": NUMBERS, "x_train": X},
    Pairs([torch.zeros(3)]),
    DataLoader(UNEVEN),
    Endless(),
    Pairs([]),
    X,
    [],
    ((X, NUMBERS), (X[:, :2], NUMBERS)),
    (X, NUMBERS + 0.5),
]


@pytest.mark.parametrize(("data", "sentence"), list(zip(BAD, TABLE, strict=True)))
def test_what_is_no_data_is_refused_in_one_sentence(data: Any, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        as_source(data)
    assert str(refused.value).startswith(sentence)
    assert "\n" not in str(refused.value)


def test_the_hash_is_that_of_the_content_and_rows_can_be_stored() -> None:
    objects: list[Any] = [(X, NAMES), (IMAGES, NUMBERS), (["a", "b"], [0, 1])]
    objects += [([("a", "b"), ("c", "d")], [0, 1]), {"n": (X, NAMES), "s": (X, NUMBERS)}]
    objects += [(torch.from_numpy(X), NAMES)]
    hashes = [fingerprint(read_object(each)) for each in objects]
    assert len(set(hashes)) == len(objects)
    assert hashes == [fingerprint(read_object(each)) for each in objects]
    changed = X.copy()
    changed[3, 1] += 1e-9
    assert fingerprint(read_object((changed, NAMES))) != hashes[0]
    for each, expected in zip(objects, hashes, strict=True):
        stored = rows_from_tree(decode(encode(rows_to_tree(read_object(each)))))
        assert fingerprint(stored) == expected


def test_held_out_rows_are_drawn_from_the_seed() -> None:
    first, second = (as_source((X, NAMES), rng=Rng(seed)) for seed in (0, 1))
    assert not torch.equal(first.test.x, second.test.x)
    assert torch.equal(first.test.x, as_source((X, NAMES), rng=Rng(0)).test.x)
