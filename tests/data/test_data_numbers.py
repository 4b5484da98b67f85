"""Targets that are numbers: how they are read, standardized and divided."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.streams import Stream, make_stream
from perdure.training.checks import check_tasks

X = np.random.default_rng(100).normal(size=(40, 3))
Y = 1000 + 50 * X[:, 0]


def stream_of(tmp_path: Path, data: dict[str, Any] | None = None, **changes: Any) -> Stream:
    if not (tmp_path / "a.npz").exists():
        np.savez(tmp_path / "a.npz", x_train=X[:30], y_train=Y[:30], x_test=X[30:], y_test=Y[30:])
    source = {"source": "npz", "path": str(tmp_path / "a.npz"), "target": "number", **(data or {})}
    values = {"data": source, "stream": {"kind": "permuted", "tasks": 2}, "clients": {"count": 3}}
    config = parse({**values, **changes})
    stream = make_stream(config, Rng(100))
    check_tasks(stream, config)
    return stream


def test_numbers_are_standardized_by_the_training_data(tmp_path: Path) -> None:
    stream = stream_of(tmp_path)
    for task in stream.tasks:
        assert task.numbers.mean == pytest.approx(Y[:30].mean())
        assert task.numbers.std == pytest.approx(Y[:30].std())
        expected = (Y[30:] - Y[:30].mean()) / Y[:30].std()
        assert np.allclose(task.test.y, expected, atol=1e-6)
        assert task.train.y.dtype == torch.float32
        restored = task.numbers.restore(task.test.y)
        assert np.allclose(restored, Y[30:], rtol=1e-6)
        assert task.classes == (0,)
        assert task.classes_of(1) == (0,)


def test_the_scale_can_be_given(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, {"target_mean": 1000.0, "target_std": 10.0})
    assert np.allclose(stream.tasks[0].test.y, (Y[30:] - 1000) / 10, atol=1e-5)


def test_numbers_that_are_all_the_same_have_the_deviation_1(tmp_path: Path) -> None:
    ones = np.ones(30)
    np.savez(tmp_path / "a.npz", x_train=X[:30], y_train=5 * ones, x_test=X[30:], y_test=Y[30:])
    assert stream_of(tmp_path).tasks[0].numbers.std == 1.0


def test_all_domains_have_the_scale_of_the_first(tmp_path: Path) -> None:
    domain, is_test = np.arange(40) // 20, np.arange(40) % 4 == 0
    y = np.where(domain == 1, Y * 100, Y)
    np.savez(tmp_path / "a.npz", x=X, y=y, domain=domain, is_test=is_test)
    first, second = stream_of(tmp_path, stream={"kind": "domains"}).tasks
    assert first.numbers == second.numbers
    assert first.numbers.mean == pytest.approx(Y[(domain == 0) & ~is_test].mean())


def test_rows_are_held_out_and_joined_as_those_of_one_class(tmp_path: Path) -> None:
    cumulative = {"kind": "permuted", "tasks": 2, "cumulative": True}
    stream = stream_of(tmp_path, {"validation": 0.2}, stream=cumulative)
    task = stream.tasks[1]
    assert len(task.train.y) == 60
    assert task.partition.sizes.sum() == 48
    (group,) = task.on_validation().groups
    assert len(group.index) == 6


def test_a_table_is_split_at_random(tmp_path: Path) -> None:
    rows = "\n".join(f"{a},{b},{y}" for (a, b, _), y in zip(X, Y, strict=True))
    (tmp_path / "t.csv").write_text(f"a,b,price\n{rows}\n", encoding="utf-8")
    data = {"source": "table", "path": str(tmp_path / "t.csv"), "label_column": "price"}
    task = stream_of(tmp_path, {**data, "test_fraction": 0.25}).tasks[0]
    assert len(task.test.y) == 10
    together = torch.cat([task.train.y, task.test.y])
    assert np.allclose(np.sort(task.numbers.restore(together)), np.sort(Y), rtol=1e-6)


BAD = [
    (np.array(["many"] * 30), r"y_train contains values that are not numbers"),
    (Y[:29], r"y_train has shape \(29,\) for 30 rows, not one number per row"),
    (
        np.where(np.arange(30) == 7, np.nan, Y[:30]),
        r"y_train contains a value in row 7 that is NaN",
    ),
]


@pytest.mark.parametrize(("y", "sentence"), BAD)
def test_targets_that_are_no_numbers_are_refused(tmp_path: Path, y: Any, sentence: str) -> None:
    np.savez(tmp_path / "a.npz", x_train=X[:30], y_train=y, x_test=X[30:], y_test=Y[30:])
    with pytest.raises(UserError, match=rf"data\.path: must be a valid npz file \({sentence}"):
        stream_of(tmp_path)


def test_a_column_that_holds_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,price\n1,2\n3,dear\n", encoding="utf-8")
    data = {"source": "table", "path": str(tmp_path / "t.csv"), "label_column": "price"}
    with pytest.raises(UserError, match=r"y contains values that are not numbers"):
        stream_of(tmp_path, data)


def test_a_domain_has_no_target_of_its_own() -> None:
    domain = {"source": "npz", "path": "a.npz", "target": "number"}
    with pytest.raises(UserError, match=r"target: must be omitted, since data\.target holds"):
        parse({"stream": {"kind": "domains", "domains": [domain]}})
