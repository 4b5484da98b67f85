"""What a curious server sees, what a participant refuses, and messages that were tampered with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from secagg_runs import Group, Sums, expect, random_sums, upload

from perdure.contract.uploads import Each, Sum
from perdure.privacy.secagg.client import SecAggClient
from perdure.privacy.secagg.errors import BelowThreshold, MalformedMessage, UnsafeRequest
from perdure.privacy.secagg.fixed_point import FixedPoint
from perdure.privacy.secagg.keys import expand_mask
from perdure.privacy.secagg.layout import row_of
from perdure.privacy.secagg.server import SecAggServer, finish
from perdure.privacy.secagg.wire import (
    DropoutRequest,
    Masked,
    Seeds,
    Session,
    Shares,
    SumRequest,
    UnmaskRequest,
    decode,
    encode,
)

FIVE, SIX = Group(5, task=9), Group(6, task=9)


def call(number: int, **more: Any) -> SumRequest:
    return FIVE.call(session=Session(9, number, nonce="x"), **more)


# ---- what the server sees


@pytest.mark.parametrize("bits", [32, 64])
def test_masked_values_are_uniform_and_unrelated_to_the_input(bits: int) -> None:
    group, size = Group(4, task=bits), 20_000
    chosen = group.call(grid=FixedPoint(bits, 10, 4))
    ramp = np.linspace(-5, 5, size)  # as far from random as a row can be
    sums = Sums(group, chosen, dict.fromkeys(range(4), ramp), dict.fromkeys(range(4), 1.0))
    sums.uploads()
    for data in sums.received.values():
        row = decode(data, Masked).row
        octets = np.bincount(row.view(np.uint8), minlength=256)
        assert stats.chisquare(octets).pvalue > 1e-4
        share = row.astype(np.float64) / 2.0**bits
        assert stats.kstest(share, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(share[3:], ramp[-len(share[3:]) :])[0, 1]) < 4 / np.sqrt(size)


def test_any_sum_of_fewer_than_all_uploads_stays_masked() -> None:
    group, size = Group(4, task=1), 20_000
    ramp = np.linspace(-5, 5, size)
    chosen = group.call(grid=FixedPoint(32, 10, 4))
    sums = Sums(group, chosen, dict.fromkeys(range(4), ramp), dict.fromkeys(range(4), 1.0))
    sums.uploads()
    rows = [decode(data, Masked).row for data in sums.received.values()]
    for left_out in range(4):
        part = sum((row for k, row in enumerate(rows) if k != left_out), chosen.grid.zeros(1))
        assert stats.kstest(part / 2.0**32, "uniform").pvalue > 1e-4


def test_an_upload_holds_no_value_weight_or_secret_in_the_clear() -> None:
    sums = random_sums(FIVE, call(1), size=200)
    sums.uploads()
    for client, data in sums.received.items():
        person = FIVE.people[client]
        row = row_of(_fields(sums, client), sums.weights[client])
        assert sums.call.grid.encode(row).tobytes()[:16] not in data
        assert sums.values[client].tobytes()[:16] not in data
        assert person.keys.master not in data
        assert person._seed(sums.call) not in data
        for bond in person._bonds(sums.call).values():
            assert bond.seed not in data
            assert bond.own_pad not in data


def _fields(sums: Sums, client: int) -> Any:
    return upload(sums.values[client])


def test_no_two_calls_share_a_mask() -> None:
    """Round, exchange, attempt, task, nonce, members and threshold all change the masks."""
    sessions = [
        Session(9, 0), Session(9, 1), Session(9, 0, 1), Session(9, 0, -1), Session(9, 0, 0, 1),
        Session(8, 0), Session(9, 0, nonce="a"), Session(9, 0, nonce="b"),
    ]  # fmt: skip
    calls = [FIVE.call(session=each) for each in sessions]
    calls += [
        FIVE.call(session=sessions[0], threshold=4),
        SIX.call(session=sessions[0]),
    ]
    masks = [_mask(each) for each in calls]
    for one in range(len(masks)):
        for other in range(one):
            assert not np.any(masks[one] == masks[other])


def _mask(chosen: SumRequest) -> Any:
    person = (FIVE if len(chosen.keys) == 5 else SIX).people[0]
    fields = {"u": Sum({"v": torch.zeros(50)})}
    return decode(person.upload(encode(chosen), fields, 0.0), Masked).row


def test_what_is_told_of_a_round_opens_no_other_round() -> None:
    """Seeds told when client 0 dropped out are not those of the round before."""
    before = random_sums(FIVE, call(2))
    before.uploads()
    after = random_sums(FIVE, call(3), gone=({0}, set(), set()))
    after.report()
    told = {seed for a in after.answered[0].values() for seed in decode(a, Seeds).seeds.values()}
    assert len(told) == 4
    used = {bond.seed for bond in FIVE.people[0]._bonds(before.call).values()}
    assert not told & used


# ---- what a participant refuses


def test_a_field_that_must_be_seen_cannot_be_sent() -> None:
    fields = {"update": Each({"v": torch.ones(2)})}
    with pytest.raises(TypeError, match="'update' client by client"):
        FIVE.people[0].upload(encode(call(4)), fields, 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: {"threshold": 2}, "not a majority"),
        (lambda c: {"threshold": 6}, "not a majority"),
        (lambda c: {"grid": FixedPoint(64, 30, 4)}, "could overflow"),
        (lambda c: {"keys": {**c.keys, 0: c.keys[1]}}, "does not hold its key"),
        (lambda c: {"keys": {k: v for k, v in c.keys.items() if k}}, "does not hold its key"),
    ],
    ids=["low threshold", "high threshold", "overflow", "another key", "not called"],
)
def test_calls_that_do_not_protect(change: Callable[[SumRequest], Any], reason: str) -> None:
    chosen = call(5)
    chosen = dataclasses.replace(chosen, **change(chosen))
    with pytest.raises(UnsafeRequest, match=reason):
        FIVE.people[0].upload(encode(chosen), _fields(random_sums(FIVE), 0), 1.0)


def test_a_sum_of_two_hides_too_little() -> None:
    pair = Group(2)
    with pytest.raises(UnsafeRequest, match="hides too little"):
        pair.people[0].upload(encode(pair.call(threshold=2)), _fields(random_sums(pair), 0), 1.0)


def test_a_second_row_under_the_same_masks() -> None:
    sums, person = random_sums(FIVE, call(6)), FIVE.people[0]
    text = encode(sums.call)
    first = person.upload(text, _fields(sums, 0), 1.0)
    assert person.upload(text, _fields(sums, 0), 1.0) == first  # the same again tells nothing
    with pytest.raises(UnsafeRequest, match="another row"):
        person.upload(text, _fields(sums, 0), 2.0)


def _settle(sums: Sums, *members: int) -> bytes:
    return encode(DropoutRequest(sums.call.context, members))


def _open(sums: Sums, receiver: int, *members: int) -> bytes:
    others = [member for member in members if member != receiver]
    sealed = {member: decode(sums.received[member], Masked).sealed[receiver] for member in others}
    return encode(UnmaskRequest(sums.call.context, members, sealed))


def _begun(number: int) -> tuple[Sums, SecAggClient]:
    sums = random_sums(FIVE, call(number, threshold=3))
    sums.uploads()
    return sums, FIVE.people[1]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ((1, 2), "fewer than the threshold"),
        ((0, 2, 3), "not one of"),
        ((1, 1, 2, 3), "not one of"),
        ((1, 2, 3, 77), "said to be back"),
    ],
)
def test_members_that_cannot_be(members: tuple[int, ...], reason: str) -> None:
    sums, person = _begun(7)
    with pytest.raises(UnsafeRequest, match=reason):
        person.answer(_settle(sums, *members))


def test_nobody_comes_back() -> None:
    sums, person = _begun(8)
    person.answer(_settle(sums, 1, 2, 3))
    with pytest.raises(UnsafeRequest, match="said to be back"):
        person.answer(_settle(sums, 0, 1, 2, 3))


def test_shares_are_given_for_the_members_that_were_settled_on_and_once() -> None:
    sums, person = _begun(9)
    person.answer(_settle(sums, 1, 2, 3, 4))
    with pytest.raises(UnsafeRequest, match="not those it settled on"):
        person.answer(_open(sums, 1, 1, 2, 3))
    given = person.answer(_open(sums, 1, 1, 2, 3, 4))
    assert set(decode(given, Shares).shares) == {1, 2, 3, 4}
    assert person.answer(_open(sums, 1, 1, 2, 3, 4)) == given
    with pytest.raises(UnsafeRequest, match="final"):
        person.answer(_settle(sums, 1, 2, 3))


def test_no_shares_of_one_who_is_gone() -> None:
    sums, person = _begun(10)
    person.answer(_settle(sums, 1, 2, 3, 4))
    request = decode(_open(sums, 1, 1, 2, 3, 4), UnmaskRequest)
    gone = decode(sums.received[0], Masked).sealed[1]
    more = dataclasses.replace(request, sealed={**request.sealed, 0: gone})
    with pytest.raises(MalformedMessage, match="each other member"):
        person.answer(encode(more))


def test_questions_about_a_sum_that_it_is_not_part_of() -> None:
    with pytest.raises(UnsafeRequest, match="no part in"):
        Group(5, task=77).people[0].answer(encode(DropoutRequest(bytes(32), (0, 1, 2))))


def test_a_participant_that_was_saved_and_read_again_goes_on_as_before() -> None:
    sums, person = _begun(11)
    person.answer(_settle(sums, 1, 2, 3))
    again = SecAggClient.from_tree(person.tree())
    request = _open(sums, 1, 1, 2, 3)
    assert again.answer(request) == person.answer(request)
    with pytest.raises(UnsafeRequest, match="said to be back"):
        again.answer(_settle(sums, 1, 2, 3, 4))
    person.forget()
    with pytest.raises(UnsafeRequest, match="no part in"):
        person.answer(request)


# ---- tampered messages


def test_a_flipped_bit_anywhere_is_seen() -> None:
    sums = random_sums(FIVE, call(12))
    sums.uploads()
    data = sums.received[0]
    for place in range(0, len(data), 37):
        broken = bytearray(data)
        broken[place] ^= 1 << place % 8
        with pytest.raises(MalformedMessage):
            decode(bytes(broken), Masked)


@pytest.mark.parametrize("data", [b"", b"short", bytes(40), b"\xff" * 200])
def test_garbage_is_refused(data: bytes) -> None:
    aggregator = SecAggServer(call(13))
    aggregator.receive(0, data)
    assert list(aggregator.refused) == [0]
    with pytest.raises(MalformedMessage):
        FIVE.people[0].upload(data, {}, 1.0)
    with pytest.raises(MalformedMessage):
        FIVE.people[0].answer(data)


def _changed(change: Callable[[Masked], Masked], number: int) -> tuple[Sums, SecAggServer]:
    """Uploads of which that of client 1 is changed by somebody who can make checksums."""
    sums = random_sums(FIVE, call(number, threshold=3))
    sums.uploads()
    aggregator = SecAggServer(sums.call)
    for client, data in sums.received.items():
        message = decode(data, Masked)
        aggregator.receive(client, encode(change(message) if client == 1 else message))
    return sums, aggregator


def _without(table: Any, client: int) -> dict[int, bytes]:
    return {key: value for key, value in table.items() if key != client}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: dataclasses.replace(m, client=2),
        lambda m: dataclasses.replace(m, context=bytes(32)),
        lambda m: dataclasses.replace(m, row=m.row[:-1]),
        lambda m: dataclasses.replace(m, row=m.row.astype(np.uint32)),
        lambda m: dataclasses.replace(m, sealed=_without(m.sealed, 3)),
        lambda m: dataclasses.replace(m, commits=_without(m.commits, 3)),
        lambda m: dataclasses.replace(m, pads={}),
        lambda m: dataclasses.replace(
            m, layout=dataclasses.replace(m.layout, fields=("update", "other"))
        ),
    ],
    ids=["name", "call", "short row", "narrow row", "sealed", "commits", "pads", "layout"],
)
def test_an_upload_of_the_wrong_form_is_refused_and_the_others_are_summed(change: Any) -> None:
    sums, aggregator = _changed(change, 14)
    expect(sums, finish(aggregator, sums.ask), [0, 2, 3, 4])
    assert list(aggregator.refused) == [1]


def test_a_wrong_pad_does_not_make_a_wrong_sum() -> None:
    """The seed that comes out is not the one committed to, so the clients are asked for shares."""
    pads = {peer: bytes(32) for peer in (0, 2, 3, 4)}
    sums, aggregator = _changed(lambda m: dataclasses.replace(m, pads=pads), 15)
    expect(sums, finish(aggregator, sums.ask), [0, 1, 2, 3, 4])
    assert len(sums.asked) == 1


def test_wrong_seeds_and_shares_are_refused() -> None:
    sums = random_sums(FIVE, call(16, threshold=3), gone=({0}, set(), set()))
    aggregator = sums.uploads()
    answers = sums.ask(aggregator.requests())
    seeds = decode(answers[1], Seeds)
    answers[1] = encode(dataclasses.replace(seeds, seeds={0: bytes(32)}))
    aggregator.take(answers)
    assert "not the one promised" in aggregator.refused[1]
    aggregator.take(sums.ask(aggregator.requests()))  # the others settle without client 1
    answers = sums.ask(aggregator.requests())
    shares = decode(answers[2], Shares)
    answers[2] = encode(dataclasses.replace(shares, shares={k: bytes(33) for k in shares.shares}))
    with pytest.raises(BelowThreshold, match="do not belong together"):
        aggregator.take(answers)


def test_a_late_upload_is_not_taken() -> None:
    sums = random_sums(FIVE, call(17), gone=({0}, set(), set()))
    aggregator = sums.uploads()
    aggregator.requests()
    late = FIVE.people[0].upload(encode(sums.call), _fields(sums, 0), 1.0)
    aggregator.receive(0, late)
    assert "after the others" in aggregator.refused[0]
    expect(sums, finish(aggregator, sums.ask), [1, 2, 3, 4])


def test_the_known_price_of_one_message() -> None:
    """With at_once, a late upload tells a server that keeps it the value; without, it does not.

    docs/privacy.md says so. The server of this library drops late uploads.
    """
    for at_once, known in ((True, True), (False, False)):
        sums = random_sums(FIVE, call(18, at_once=at_once), gone=({0}, set(), set()))
        sums.report()
        late = FIVE.people[0].upload(encode(sums.call), _fields(sums, 0), sums.weights[0])
        row = decode(late, Masked).row.copy()
        for answer in sums.answered[0].values():
            message = decode(answer, Seeds)
            row -= expand_mask(
                message.seeds[0], len(row), sums.call.grid
            )  # client 0 added them all
        covered = decode(late, Masked).covered
        for client, data in sums.received.items():
            pad = decode(data, Masked).pads.get(0)
            if pad is not None and client != 0:
                covered = bytes(a ^ b for a, b in zip(covered, pad, strict=True))
        seed = covered if len(covered) == 32 else bytes(32)
        row -= expand_mask(seed, len(row), sums.call.grid)
        truth = row_of(_fields(sums, 0), sums.weights[0])
        found = np.allclose(sums.call.grid.decode(row), truth, atol=1e-8)
        assert found == known
