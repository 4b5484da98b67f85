"""Sampling of clients: uniform, independent between rounds, and among those with data."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest, chisquare

from perdure.config import Config, parse
from perdure.core.rng import Rng
from perdure.training.experiment import build_experiment
from perdure.training.sampling import clients_with_data, remove_dropouts, sample_clients


def config(count: int, per_round: int | None = None, dropout: float = 0.0) -> Config:
    return parse({"clients": {"count": count, "per_round": per_round, "dropout": dropout}})


def task(sizes: list[int]) -> Any:
    return SimpleNamespace(partition=SimpleNamespace(sizes=np.array(sizes)))


def context(round_: int, task_: int = 0, seed: int = 0) -> Any:
    return SimpleNamespace(rng=Rng(seed), task=task_, round=round_, attempt=0)


def test_a_sample_is_without_replacement_and_in_order() -> None:
    for round_ in range(50):
        chosen = sample_clients(config(20, 7), task([1] * 20), context(round_))
        assert len(set(chosen)) == 7
        assert chosen == sorted(chosen)
        assert set(chosen) <= set(range(20))


def test_all_clients_are_sampled_by_default() -> None:
    assert sample_clients(config(6), task([1] * 6), context(0)) == [0, 1, 2, 3, 4, 5]


def test_every_client_and_every_pair_is_equally_likely() -> None:
    settings, everyone, rounds = config(8, 3), task([1, 900] * 4), 2800
    one: Counter[int] = Counter()
    two: Counter[tuple[int, int]] = Counter()
    for round_ in range(rounds):
        chosen = sample_clients(settings, everyone, context(round_))
        one.update(chosen)
        two.update((a, b) for a in chosen for b in chosen if a < b)
    assert len(one) == 8
    assert len(two) == 28
    # drawn without replacement, counts scatter less than chi-square assumes: the test is one-sided
    assert chisquare(list(one.values())).pvalue > 1e-3
    assert chisquare(list(two.values())).pvalue > 1e-3


def test_samples_of_different_rounds_are_independent() -> None:
    settings, everyone = config(10, 5), task([1] * 10)
    drawn = [set(sample_clients(settings, everyone, context(round_))) for round_ in range(600)]
    again = sum(len(a & b) for a, b in itertools.pairwise(drawn))
    assert binomtest(again, 599 * 5, 0.5).pvalue > 1e-3


def test_a_sample_depends_on_seed_task_and_round_alone() -> None:
    settings, everyone = config(30, 5), task([1] * 30)
    there = sample_clients(settings, everyone, context(4, 2))
    for round_ in range(4):
        sample_clients(settings, everyone, context(round_, 2))
    assert sample_clients(settings, everyone, context(4, 2)) == there
    others = [context(5, 2), context(4, 1), context(4, 2, seed=1), context(2, 4)]
    assert all(sample_clients(settings, everyone, other) != there for other in others)


def test_only_clients_with_data_are_sampled() -> None:
    sizes = [0, 3, 0, 1, 5, 0]
    assert clients_with_data(task(sizes)) == [1, 3, 4]
    seen = {c for r in range(40) for c in sample_clients(config(6, 2), task(sizes), context(r))}
    assert seen == {1, 3, 4}
    assert sample_clients(config(6, 5), task(sizes), context(0)) == [1, 3, 4]


@pytest.mark.parametrize(
    ("share", "sampled", "left"), [(0.0, 10, 10), (0.3, 10, 7), (0.5, 4, 2), (0.7, 10, 3)]
)
def test_a_fraction_of_the_sampled_clients_drops_out(share: float, sampled: int, left: int) -> None:
    clients = list(range(100, 100 + sampled))
    found = remove_dropouts(config(sampled, dropout=share), clients, context(0))
    assert len(found) == left
    assert found == sorted(found)
    assert set(found) <= set(clients)


@pytest.mark.parametrize(("share", "sampled"), [(0.1, 4), (0.6, 1), (0.9, 3), (0.35, 10)])
def test_a_fraction_that_is_no_integer_of_clients_holds_on_average(
    share: float, sampled: int
) -> None:
    settings, clients = config(sampled, dropout=share), list(range(sampled))
    lost = [sampled - len(remove_dropouts(settings, clients, context(r))) for r in range(600)]
    least = int(share * sampled)
    assert set(lost) == {least, least + 1}
    more, part = lost.count(least + 1), share * sampled - least
    assert binomtest(more, len(lost), part).pvalue > 1e-3


def test_dropouts_are_uniform_and_drawn_in_every_round() -> None:
    clients = list(range(10))
    missing: Counter[int] = Counter()
    for round_ in range(500):
        there = remove_dropouts(config(10, dropout=0.2), clients, context(round_))
        missing.update(set(clients) - set(there))
    assert sum(missing.values()) == 1000
    assert chisquare([missing[c] for c in clients]).pvalue > 1e-3


def test_dropouts_are_independent_of_the_sample() -> None:
    """They are drawn for two purposes, each in its own task and round."""
    asked: list[tuple[Any, ...]] = []

    def numpy_generator(*arguments: Any) -> np.random.Generator:
        asked.append(arguments)
        return Rng(0).numpy_generator(*arguments)

    drawer = SimpleNamespace(numpy_generator=numpy_generator)
    here: Any = SimpleNamespace(rng=drawer, task=3, round=5, attempt=0)
    settings = config(10, 10, 0.1)
    remove_dropouts(settings, sample_clients(settings, task([1] * 10), here), here)
    assert len({purpose for purpose, *_ in asked}) == 2
    assert [tuple(where) for _, *where in asked] == [(3, 5), (3, 5)]


def test_absent_clients_hold_nothing_and_are_never_sampled() -> None:
    values = {"stream": {"tasks": 4, "presence": 0.5}, "clients": {"count": 8, "per_round": 3}}
    experiment = build_experiment(parse({**values, "data": {"limit": 200}}))
    for number in range(4):
        there = clients_with_data(experiment.task(number))
        assert len(there) == 4
        for round_ in range(10):
            assert set(
                sample_clients(experiment.config, experiment.task(number), context(round_))
            ) <= set(there)
        absent = set(range(8)) - set(there)
        assert all(len(experiment.task(number).partition.index(c)) == 0 for c in absent)
