"""The feature cache: computed once per row, whichever rows are gathered first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from perdure.config import parse
from perdure.core.rng import Rng
from perdure.data.examples import Examples, Normalization
from perdure.data.feature_cache import CacheFolder, FeatureCache, with_feature_cache
from perdure.data.streams import make_stream
from perdure.data.streams.stream import LazyTasks, Task

ROWS, WIDTH, SIZE = 700, 6, 5


class Counting:
    """A projection that counts the rows it has seen."""

    def __init__(self) -> None:
        self.weight = torch.randn(WIDTH, SIZE, generator=torch.Generator().manual_seed(0))
        self.rows = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        return torch.tanh(x @ self.weight)


@pytest.fixture
def examples() -> Examples:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 256, (ROWS, WIDTH), generator=generator, dtype=torch.uint8)
    normalization = Normalization(torch.full((WIDTH,), 1 / 255), torch.zeros(WIDTH))
    return Examples(rows, torch.zeros(ROWS), normalization=normalization)


@pytest.mark.parametrize("most", [1 << 30, 0], ids=["in memory", "memory-mapped"])
def test_each_row_is_computed_once_and_gathered_like_the_inputs(
    examples: Examples, most: int
) -> None:
    compute = Counting()
    known = FeatureCache(examples, compute, SIZE, most)
    index = torch.tensor([[3, 699], [3, 300]])
    found = known.gather(index)
    assert found.shape == (2, 2, SIZE)
    torch.testing.assert_close(found, torch.tanh(examples.gather(index) @ compute.weight))
    for _ in range(3):
        known.gather(torch.arange(ROWS))
    assert compute.rows == ROWS


def test_no_bit_depends_on_which_rows_are_gathered_first(examples: Examples) -> None:
    whole, scattered = (
        FeatureCache(examples, Counting(), SIZE),
        FeatureCache(examples, Counting(), SIZE),
    )
    for row in torch.randperm(ROWS, generator=torch.Generator().manual_seed(2))[:50]:
        scattered.gather(row.reshape(1))
    everything = torch.arange(ROWS)
    assert torch.equal(whole.gather(everything), scattered.gather(everything))


def test_a_folder_shares_features_between_processes(examples: Examples, tmp_path: Path) -> None:
    compute, folder = Counting(), CacheFolder(tmp_path / "cache", "backbone")
    index = torch.tensor([[3, 699], [3, 300]])
    first = FeatureCache(examples, compute, SIZE, folder=folder).gather(index)
    again = FeatureCache(examples, compute, SIZE, folder=folder).gather(index)  # as a new process
    assert compute.rows == 256 + 256 + 188  # blocks of rows
    assert torch.equal(first, again)
    assert torch.equal(first, FeatureCache(examples, Counting(), SIZE).gather(index))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".features"]


def test_other_rows_and_other_backbones_have_other_files(
    examples: Examples, tmp_path: Path
) -> None:
    changed = replace(examples, x=examples.x.flip(0))
    order = torch.arange(WIDTH).flip(0)
    for number, (each, of) in enumerate(
        [
            (examples, "a"),
            (changed, "a"),
            (examples, "b"),
            (replace(examples, permutation=order), "a"),
        ]
    ):
        compute = Counting()
        found = FeatureCache(each, compute, SIZE, folder=CacheFolder(tmp_path, of)).gather(
            torch.arange(ROWS)
        )
        torch.testing.assert_close(
            found, torch.tanh(each.gather(torch.arange(ROWS)) @ compute.weight)
        )
        assert compute.rows == ROWS
        assert len(list(tmp_path.iterdir())) == number + 1


def test_lazily_made_tasks_stay_lazy(tmp_path: Path) -> None:
    stream = make_stream(parse({"stream": {"kind": "split", "tasks": 3}}), Rng(0)).to("cpu")
    asked: list[int] = []

    def make(number: int) -> Task:
        asked.append(number)
        return stream.tasks[number]

    lazy = replace(stream, tasks=LazyTasks(3, make))
    compute = Counting()
    tasks = with_feature_cache(
        lazy, lambda x: compute(x.flatten(1)[:, :WIDTH]), SIZE, CacheFolder(tmp_path, "a")
    )
    assert not asked
    for _ in range(2):
        tasks.tasks[1].train.gather_cached(torch.tensor([0]))
    assert asked == [1, 1]
    assert compute.rows == 256


def test_inputs_without_a_cache_have_no_cached_features(examples: Examples) -> None:
    assert examples.gather_cached(torch.tensor([0])) is None
    cached = replace(
        examples, cached_features=FeatureCache(examples, Counting(), SIZE)
    ).gather_cached(torch.tensor([0, 1]))
    assert cached is not None
    assert cached.shape == (2, SIZE)


@pytest.mark.parametrize(("kind", "sets"), [("split", 2), ("permuted", 6)])
def test_tasks_over_the_same_rows_share_a_cache(kind: str, sets: int) -> None:
    stream = make_stream(parse({"stream": {"kind": kind, "tasks": 3}}), Rng(0)).to("cpu")
    tasks = with_feature_cache(stream, lambda x: x.flatten(1)[:, :SIZE], SIZE).tasks
    assert (
        len({id(part.cached_features) for task in tasks for part in (task.train, task.test)})
        == sets
    )
    for task in tasks:
        rows = torch.tensor([0, 7])
        torch.testing.assert_close(
            task.test.gather_cached(rows), task.test.gather(rows).flatten(1)[:, :SIZE]
        )
