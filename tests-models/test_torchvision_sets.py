"""Data sets of torchvision, read by its own classes from files that are written here."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from perdure.data.named.files import Unavailable, read_torchvision
from perdure.data.named.sets import DATA_SETS
from perdure.models.adapter.build import import_library

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import official_files as files

try:
    import_library("torchvision.datasets.MNIST")
    from torchvision import datasets
except Exception as error:  # not installed, or for another torch
    pytest.skip(f"torchvision cannot be imported: {error}", allow_module_level=True)


def read(name: str, root: Path) -> dict[str, np.ndarray]:
    origin = DATA_SETS[name].torchvision
    return read_torchvision(getattr(datasets, origin.name), origin, str(root), download=False)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "kmnist"])
def test_sets_like_mnist(name: str, tmp_path: Path) -> None:
    raw = tmp_path / DATA_SETS[name].torchvision.name / "raw"
    expected = files.write_mnist(raw, end="")
    found = read(name, tmp_path)
    assert all(np.array_equal(found[key], array) for key, array in expected.items())


def test_letters_are_upright_and_begin_at_0(tmp_path: Path) -> None:
    raw = tmp_path / "EMNIST" / "raw"
    expected = files.write_mnist(raw, "emnist-letters-", "test", "", first=1)
    found = read("emnist-letters", tmp_path)
    assert np.array_equal(found["x_test"][2], expected["x_test"][2].T)
    assert np.array_equal(found["y_train"], expected["y_train"] - 1)


def test_usps_as_our_reader_has_it(tmp_path: Path) -> None:
    from perdure.data.named.official import read_usps

    files.write_usps(tmp_path)
    found, ours = read("usps", tmp_path), read_usps(tmp_path, DATA_SETS["usps"])
    assert all(np.array_equal(found[key], array) for key, array in ours.items())


def test_every_class_is_there() -> None:
    for data_set in DATA_SETS.values():
        if data_set.torchvision is not None:
            assert hasattr(datasets, data_set.torchvision.name)


def test_missing_files_are_a_reason(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="torchvision"):
        read("cifar100", tmp_path)
