"""Secure sums: right for every pattern of dropouts, and lost below the threshold."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secagg_runs import Group, Sums, expect, random_sums

from perdure.privacy.secagg.errors import BelowThreshold
from perdure.privacy.secagg.fixed_point import FixedPoint
from perdure.privacy.secagg.server import finish
from perdure.privacy.secagg.wire import (
    DropoutRequest,
    Seeds,
    Session,
    Shares,
    UnmaskRequest,
    decode,
)

FIVE = Group(5)
SUBSETS = [set(part) for part in chain.from_iterable(combinations(range(5), k) for k in range(6))]
NOBODY: set[int] = set()


def session(*numbers: int) -> Session:
    return Session(0, *numbers, nonce="test")


@settings(max_examples=15, deadline=None)
@given(
    count=st.integers(3, 7),
    bits=st.sampled_from([32, 64]),
    precision=st.integers(4, 16),
    size=st.integers(2, 40),
    scale=st.floats(1e-3, 2.0),
    seed=st.integers(0, 999),
)
def test_the_sum_is_the_plain_sum_to_the_step(
    count: int, bits: int, precision: int, size: int, scale: float, seed: int
) -> None:
    group, rng = Group(count), np.random.default_rng(seed)
    values = {client: scale * rng.normal(size=size) for client in range(count)}
    weights = {client: float(rng.integers(1, 50)) for client in range(count)}
    call = group.call(grid=FixedPoint(bits, precision, count), session=session(seed))
    sums = Sums(group, call, values, weights)
    expect(sums, sums.report(), list(range(count)))


def test_a_round_without_dropouts_costs_one_message() -> None:
    sums = random_sums(FIVE, FIVE.call(session=session(1)))
    expect(sums, sums.report(), [0, 1, 2, 3, 4])
    assert sums.asked == []


def test_without_at_once_every_round_costs_a_second_one() -> None:
    sums = random_sums(FIVE, FIVE.call(session=session(2), at_once=False))
    expect(sums, sums.report(), [0, 1, 2, 3, 4])
    assert len(sums.asked) == 1
    assert len(sums.asked[0]) == 5


@pytest.mark.parametrize(
    ("stage", "at_once"),
    [(0, True), (0, False), (1, True), (2, False)],
    ids=["uploads", "uploads, never at once", "settling", "opening"],
)
def test_every_pattern_of_dropouts_at_every_stage(stage: int, at_once: bool) -> None:
    """After stage 0 with a sixth client that is gone from the first, so that all stages occur."""
    group = Group(6, task=stage)
    for place, subset in enumerate(SUBSETS):
        gone = [{5} if stage else set(), set(), set()]
        gone[stage] = gone[stage] | subset
        call = group.call(session=session(place, int(at_once)), threshold=4, at_once=at_once)
        sums = random_sums(group, call, size=4, gone=(gone[0], gone[1], gone[2]))
        left = [c for c in range(6) if c not in gone[0] | gone[1]]
        if len(left) < 4 or len([c for c in left if c not in gone[2]]) < 4:
            with pytest.raises(BelowThreshold, match="threshold is 4"):
                sums.report()
        else:
            expect(sums, sums.report(), left)


FATES = st.lists(st.integers(0, 3), min_size=5, max_size=5)


@settings(max_examples=40, deadline=None)
@given(fates=FATES, at_once=st.booleans(), threshold=st.integers(3, 5))
def test_dropouts_at_several_stages(fates: list[int], at_once: bool, threshold: int) -> None:
    """And of no client both kinds of secret are ever told."""
    gone = tuple({c for c, fate in enumerate(fates) if fate == stage} for stage in range(3))
    number = int("".join(map(str, fates)), 4)
    call = FIVE.call(session=session(number, 1), at_once=at_once, threshold=threshold)
    sums = random_sums(FIVE, call, size=4, gone=gone)  # type: ignore[arg-type]
    try:
        report = sums.report()
    except BelowThreshold:
        assert sum(fate == 3 for fate in fates) < threshold
    else:
        # who vanishes after uploading is in the sum only if nobody had to settle after that
        settled = bool(gone[0])
        away = gone[0] | (gone[1] if settled else NOBODY)
        expect(sums, report, [c for c in range(5) if c not in away])
    _never_both(sums)


def _never_both(sums: Sums) -> None:
    unmasked_pairs, unmasked_selves = set(), set()
    for answers in sums.answered:
        for data in answers.values():
            for kind in (Seeds, Shares):
                found = _maybe(data, kind)
                if isinstance(found, Seeds):
                    unmasked_pairs |= set(found.seeds)
                elif isinstance(found, Shares):
                    unmasked_selves |= set(found.shares)
    assert not unmasked_pairs & unmasked_selves


def _maybe(data: bytes, kind: Any) -> Any:
    try:
        return decode(data, kind)
    except ValueError:
        return None


def test_whoever_vanishes_while_settling_is_left_out_by_the_others() -> None:
    group = Group(7)
    call = group.call(threshold=4)
    sums = random_sums(group, call, gone=({0}, {1, 2}, set()))
    expect(sums, sums.report(), [3, 4, 5, 6])
    kinds = [
        [
            kind.kind
            for kind in (DropoutRequest, UnmaskRequest)
            if _maybe(next(iter(r.values())), kind)
        ]
        for r in sums.asked
    ]
    assert kinds == [["settle"], ["settle"], ["open"]]


def test_fifty_clients() -> None:
    group = Group(50)
    gone = (set(range(0, 50, 9)), {1, 2}, {3, 4, 5})
    sums = random_sums(group, group.call(session=session(2)), size=200, gone=gone)
    expect(sums, sums.report(), [c for c in range(50) if c not in gone[0] | gone[1]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_a_client_with_a_bad_value_declines_and_the_others_go_on(bad: float) -> None:
    """Nobody could see it in a masked sum, so the client itself looks."""
    group = Group(5)
    sums = random_sums(group, group.call(session=session(3)))
    sums.values[2][5] = bad
    aggregator = sums.uploads()
    assert list(aggregator.declined) == [2]
    expected = "not finite" if not np.isfinite(bad * sums.weights[2]) else "above the limit"
    assert expected in aggregator.declined[2]
    assert len(sums.received[2]) < 400
    expect(sums, finish(aggregator, sums.ask), [0, 1, 3, 4])
