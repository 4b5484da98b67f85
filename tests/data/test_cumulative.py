"""Cumulative streams: task t is trained on what clients held in tasks 1 to t."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_no_future import PARTITIONS, save_domain

from perdure.config import parse
from perdure.core.rng import Rng
from perdure.data.examples import Examples, JoinedExamples, Normalization
from perdure.data.streams import Stream, make_stream

CLIENTS, TASKS = 4, 3
STREAMS = [
    {"kind": "permuted"},
    {"kind": "split", "classes_per_task": 2},
    {"kind": "split", "classes_per_task": 3, "overlap": 2},
    {"kind": "pool", "classes_per_task": 2},
    {"kind": "domains"},
    {"kind": "domains", "labels": "separate"},
]


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("domains")
    return [save_domain(folder / f"{number}.npz", number) for number in range(5)]


def build(stream: dict[str, Any], domains: list[dict[str, str]], **keys: Any) -> Stream:
    listed = {"domains": domains} if stream["kind"] == "domains" else {}
    clients = {"count": CLIENTS, "partition": keys.pop("partition", PARTITIONS[1])}
    section = {"tasks": TASKS, **stream, **listed, **keys}
    return make_stream(parse({"stream": section, "clients": clients, "data": {}}), Rng(3))


@pytest.mark.parametrize("stream", STREAMS, ids=str)
@pytest.mark.parametrize("presence", [1.0, 0.5])
def test_a_client_holds_what_it_held_so_far(
    stream: dict[str, Any], presence: float, domains: list[dict[str, str]]
) -> None:
    plain = build(stream, domains, presence=presence)
    joined = build(stream, domains, presence=presence, cumulative=True)
    for number, task in enumerate(joined.tasks):
        past = plain.tasks[: number + 1]
        for client in range(CLIENTS):
            rows = task.partition.index(client)
            held = [(one, one.partition.index(client)) for one in past]
            assert len(rows) == task.partition.sizes[client]
            x = torch.cat([one.train.gather(index) for one, index in held])
            y = torch.cat([one.train.y[index] for one, index in held])
            origins = [one.index for one, index in held for _ in index]
            assert torch.equal(task.train.gather(rows), x)
            assert torch.equal(task.train.y[rows], y)
            assert task.train.origins is not None
            assert task.train.origins[rows].tolist() == origins
            assert set(task.classes_of(client)) == set(y.tolist())
        counts = sum(one.partition.counts(one.train.y.numpy(), plain.classes) for one in past)
        assert np.array_equal(task.partition.counts(task.train.y.numpy(), plain.classes), counts)


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_what_is_tested_stays_and_the_future_is_not_known(
    stream: dict[str, Any], domains: list[dict[str, str]]
) -> None:
    plain = build(stream, domains)
    joined = build(stream, domains, cumulative=True)
    longer = build(stream, domains, cumulative=True, tasks=TASKS + 1)
    for one, task, same in zip(plain.tasks, joined.tasks, longer.tasks, strict=False):
        assert task.classes == one.classes == same.classes
        assert torch.equal(task.test.y, one.test.y)
        for group, other in zip(task.groups, one.groups, strict=True):
            assert group.classes == other.classes
            assert torch.equal(group.index, other.index)
            assert torch.equal(task.test.gather(group.index), one.test.gather(other.index))
        assert torch.equal(task.train.y, same.train.y)
        for client in range(CLIENTS):
            assert torch.equal(task.partition.index(client), same.partition.index(client))


def test_rows_of_any_order_and_shape() -> None:
    rows = torch.arange(12, dtype=torch.uint8).view(4, 3)
    scale, shift = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.0, -1.0])
    plain = Examples(rows, torch.zeros(4), normalization=Normalization(scale, shift))
    order = torch.tensor([2, 0, 1])
    joined = JoinedExamples((plain, replace(plain, permutation=order), plain))
    assert len(joined) == 12
    all_rows = rows.float() * scale + shift
    expected = torch.cat([all_rows, all_rows[:, order], all_rows])
    index = torch.tensor([[11, 4, 0], [7, 7, 3]])
    assert torch.equal(joined.gather(index), expected[index])
    assert joined.gather(index[:0]).shape == (0, 3, 3)
    assert joined.gather_cached(index) is None


def test_cached_features_come_from_the_task_of_the_row() -> None:
    rows = torch.arange(8, dtype=torch.uint8).view(4, 2)
    normalization = Normalization(torch.ones(2), torch.zeros(2))
    plain = Examples(rows, torch.zeros(4), normalization=normalization)

    class Doubled:
        def __init__(self, examples: Examples) -> None:
            self.examples = examples

        def gather(self, index: torch.Tensor) -> torch.Tensor:
            return 2 * self.examples.gather(index)

    def cached(examples: Examples) -> Examples:
        return replace(examples, cached_features=Doubled(examples))

    joined = JoinedExamples((plain, replace(plain, permutation=torch.tensor([1, 0])), plain)).map(
        cached
    )
    index = torch.tensor([[1, 6], [9, 2]])
    cached_rows = joined.gather_cached(index)
    assert cached_rows is not None
    assert torch.equal(cached_rows, 2 * joined.gather(index))
    assert joined.parts[0] is joined.parts[2]


@pytest.mark.parametrize("stream", STREAMS, ids=str)
def test_validation_rows_are_those_of_the_task_and_nobody_trains_on_them(
    stream: dict[str, Any], domains: list[dict[str, str]]
) -> None:
    listed = {"domains": domains} if stream["kind"] == "domains" else {}
    values = {"clients": {"count": CLIENTS}, "data": {"validation": 0.2}}
    plain, joined = (
        make_stream(
            parse(values | {"stream": {"tasks": TASKS, **stream, **listed, **more}}), Rng(3)
        )
        for more in ({}, {"cumulative": True})
    )
    for one, task in zip(plain.tasks, joined.tasks, strict=True):
        mine, others = task.on_validation(), one.on_validation()
        for group, other in zip(mine.groups, others.groups, strict=True):
            assert len(group.index) > 0
            assert torch.equal(mine.test.gather(group.index), others.test.gather(other.index))
            assert torch.equal(mine.test.y[group.index], others.test.y[other.index])
            for client in range(CLIENTS):
                assert not torch.isin(task.partition.index(client), group.index).any()
