"""Classes of several sources are joined by name; the order of classes and domains is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.streams import Stream, make_stream

GRAY = {"cat": 10, "dog": 20, "fox": 30, "owl": 40}
"""The gray level of the images of a class, by which it is recognized."""


def folder(root: Path, *names: str) -> dict[str, Any]:
    for name in names:
        (root / name).mkdir(parents=True)
        for number in range(5 * (name in GRAY)):
            pixels = np.full((3, 3), GRAY[name] + number, np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return {"source": "folder", "path": str(root)}


def build(**values: Any) -> Stream:
    clients = {"count": 1}
    return make_stream(parse({"clients": clients, **values}), Rng(0))


def shown(stream: Stream, task: int) -> dict[str, set[int]]:
    """Return the gray levels of the training images of a task by the name of their class."""
    work = stream.tasks[task]
    found: dict[str, set[int]] = {}
    for row, label in zip(work.train.rows, work.train.y, strict=True):
        found.setdefault(stream.class_names[label], set()).add(int(row[0]) // 10 * 10)
    return found


def domains(*sources: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"kind": "domains", "domains": list(sources), **keys}


def test_a_dog_is_a_dog_in_every_domain(tmp_path):
    a, b = folder(tmp_path / "a", "cat", "dog"), folder(tmp_path / "b", "dog", "fox")
    stream = build(stream=domains(a, b))
    assert stream.class_names == ("cat", "dog", "fox")
    assert shown(stream, 0) == {"cat": {10}, "dog": {20}}
    assert shown(stream, 1) == {"dog": {20}, "fox": {30}}
    assert [task.classes for task in stream.tasks] == [(0, 1), (1, 2)]


def test_the_same_names_in_another_order_are_the_same_classes(tmp_path):
    rng = np.random.default_rng(0)
    sources = []
    for number, names in enumerate((["cat", "dog"], ["dog", "cat"])):
        y = np.arange(20) % 2
        x = np.array([[GRAY[names[label]] + rng.random()] for label in y])
        path = tmp_path / f"{number}.npz"
        np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y, class_names=np.array(names))
        sources.append({"source": "npz", "path": str(path)})
    stream = build(stream=domains(*sources))
    assert shown(stream, 0) == shown(stream, 1) == {"cat": {10}, "dog": {20}}
    joined = build(stream=domains(*sources) | {"kind": "split", "tasks": 1})
    assert shown(joined, 0) == {"cat": {10}, "dog": {20}}


def test_sources_without_a_common_name_are_refused(tmp_path):
    a, b = folder(tmp_path / "a", "cat", "dog"), folder(tmp_path / "b", "fox", "owl")
    sentence = r"^stream\.labels: must be 'separate' .*\(a: cat, dog; b: fox, owl\), got 'shared'$"
    with pytest.raises(UserError, match=sentence):
        build(stream=domains(a, b))
    assert build(stream=domains(a, b, labels="separate")).classes == 4


def test_classes_of_a_split_stream_come_in_the_given_order(tmp_path):
    data = folder(tmp_path, *GRAY)
    for order in (["owl", "cat", "dog"], [3, 0, 1]):
        stream = build(data=data, stream={"kind": "split", "tasks": 3, "order": order})
        assert [set(shown_classes(stream, t)) for t in range(3)] == [{"owl"}, {"cat"}, {"dog"}]
    for order in ([0, 0], [4], ["cow"], []):
        with pytest.raises(
            UserError, match=r"^stream\.order: must be different numbers from 0 to 3"
        ):
            build(data=data, stream={"kind": "split", "tasks": 1, "order": order})


def shown_classes(stream: Stream, task: int) -> list[str]:
    return [stream.class_names[label] for label in stream.tasks[task].classes]


def test_domains_come_in_the_given_order_by_name(tmp_path):
    for name in ("photo", "sketch"):
        folder(tmp_path / name, "cat", "dog")
    data = {"source": "folder", "path": str(tmp_path)}
    stream = build(data=data, stream={"kind": "domains", "order": ["sketch", "photo"]})
    assert [task.name for task in stream.tasks] == ["sketch", "photo"]


def test_empty_and_hidden_folders_are_no_classes(tmp_path, caplog):
    data = folder(tmp_path, "cat", "dog", "empty", "__MACOSX", ".hidden")
    (tmp_path / ".DS_Store").write_bytes(b"")
    stream = build(data=data, stream={"kind": "permuted", "tasks": 1})
    assert stream.class_names == ("cat", "dog")
    assert "class folders without images are left out: empty" in caplog.text
