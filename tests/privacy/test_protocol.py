"""Secure sums: correct for every pattern of dropouts, and refused below the threshold."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from secagg_runs import Group, Sums, expect, random_sums

from perdure.privacy.secagg.layout import FixedPoint
from perdure.privacy.secagg.messages import (
    BelowThreshold,
    DropoutRequest,
    PairSeeds,
    SeedShares,
    Session,
    UnmaskRequest,
    decode,
)
from perdure.privacy.secagg.server import open_sum

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
def test_the_sum_equals_the_plain_sum_up_to_rounding(
    count: int, bits: int, precision: int, size: int, scale: float, seed: int
) -> None:
    group, rng = Group(count), np.random.default_rng(seed)
    values = {client: scale * rng.normal(size=size) for client in range(count)}
    weights = {client: float(rng.integers(1, 50)) for client in range(count)}
    request = group.request(fixed_point=FixedPoint(bits, precision, count), session=session(seed))
    sums = Sums(group, request, values, weights)
    expect(sums, sums.open(), list(range(count)))


def test_a_round_without_dropouts_takes_one_message() -> None:
    sums = random_sums(FIVE, FIVE.request(session=session(1)))
    expect(sums, sums.open(), [0, 1, 2, 3, 4])
    assert sums.asked == []


def test_every_round_takes_two_messages_if_single_message_is_off() -> None:
    sums = random_sums(FIVE, FIVE.request(session=session(2), single_message=False))
    expect(sums, sums.open(), [0, 1, 2, 3, 4])
    assert len(sums.asked) == 1
    assert len(sums.asked[0]) == 5


@pytest.mark.parametrize(
    ("stage", "single_message"),
    [(0, True), (0, False), (1, True), (2, False)],
    ids=["uploads", "uploads, two messages", "seeds", "shares"],
)
def test_any_clients_may_drop_out_at_any_stage(stage: int, single_message: bool) -> None:
    """From stage 1 on a sixth client drops out at once, so that all stages occur."""
    group = Group(6, task=stage)
    for index, subset in enumerate(SUBSETS):
        gone = [{5} if stage else set(), set(), set()]
        gone[stage] = gone[stage] | subset
        request = group.request(
            session=session(index, int(single_message)), threshold=4, single_message=single_message
        )
        sums = random_sums(group, request, size=4, gone=(gone[0], gone[1], gone[2]))
        left = [c for c in range(6) if c not in gone[0] | gone[1]]
        if len(left) < 4 or len([c for c in left if c not in gone[2]]) < 4:
            with pytest.raises(BelowThreshold, match="threshold is 4"):
                sums.open()
        else:
            expect(sums, sums.open(), left)


STAGES = st.lists(st.integers(0, 3), min_size=5, max_size=5)


@settings(max_examples=40, deadline=None)
@given(stages=STAGES, single_message=st.booleans(), threshold=st.integers(3, 5))
def test_clients_may_drop_out_at_several_stages(
    stages: list[int], single_message: bool, threshold: int
) -> None:
    """Of no client are both kinds of secrets ever revealed."""
    gone = tuple({c for c, dropout in enumerate(stages) if dropout == stage} for stage in range(3))
    number = int("".join(map(str, stages)), 4) * 16 + 2 * threshold + single_message
    request = FIVE.request(
        session=session(number, 1), single_message=single_message, threshold=threshold
    )
    sums = random_sums(FIVE, request, size=4, gone=gone)  # type: ignore[arg-type]
    try:
        collected = sums.open()
    except BelowThreshold:
        assert sum(dropout == 3 for dropout in stages) < threshold
    else:
        # a client that drops out after its upload is in the sum only if no seeds were asked for
        seeds_asked = bool(gone[0])
        left_out = gone[0] | (gone[1] if seeds_asked else NOBODY)
        expect(sums, collected, [c for c in range(5) if c not in left_out])
    _never_both(sums)


def _never_both(sums: Sums) -> None:
    unmasked_pairs, unmasked_selves = set(), set()
    for answers in sums.answered:
        for data in answers.values():
            for kind in (PairSeeds, SeedShares):
                message = _maybe(data, kind)
                if isinstance(message, PairSeeds):
                    unmasked_pairs |= set(message.seeds)
                elif isinstance(message, SeedShares):
                    unmasked_selves |= set(message.shares)
    assert not unmasked_pairs & unmasked_selves


def _maybe(data: bytes, kind: Any) -> Any:
    try:
        return decode(data, kind)
    except ValueError:
        return None


def test_a_client_that_does_not_give_its_seeds_is_left_out() -> None:
    group = Group(7)
    request = group.request(threshold=4)
    sums = random_sums(group, request, gone=({0}, {1, 2}, set()))
    expect(sums, sums.open(), [3, 4, 5, 6])
    kinds = [
        [
            kind.kind
            for kind in (DropoutRequest, UnmaskRequest)
            if _maybe(next(iter(r.values())), kind)
        ]
        for r in sums.asked
    ]
    assert kinds == [["dropout_request"], ["dropout_request"], ["unmask_request"]]


def test_fifty_clients_with_dropouts_at_all_stages() -> None:
    group = Group(50)
    gone = (set(range(0, 50, 9)), {1, 2}, {3, 4, 5})
    sums = random_sums(group, group.request(session=session(2)), size=200, gone=gone)
    expect(sums, sums.open(), [c for c in range(50) if c not in gone[0] | gone[1]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e300])
def test_a_client_with_a_bad_value_declines_and_the_others_are_summed(bad: float) -> None:
    """A masked value cannot be checked by the server, so the client checks it."""
    group = Group(5)
    sums = random_sums(group, group.request(session=session(3)))
    sums.values[2][5] = bad
    server = sums.uploads()
    assert list(server.declined) == [2]
    expected = "not finite" if not np.isfinite(bad * sums.weights[2]) else "above the limit"
    assert expected in server.declined[2]
    assert len(sums.received[2]) < 400
    expect(sums, open_sum(server, sums.ask), [0, 1, 3, 4])
