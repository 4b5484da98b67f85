"""What a curious server sees, what a client refuses, and messages that were tampered with."""

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
from perdure.privacy.secagg.keys import expand_mask
from perdure.privacy.secagg.layout import FixedPoint, row_of
from perdure.privacy.secagg.messages import (
    BelowThreshold,
    DropoutRequest,
    MalformedMessage,
    MaskedRow,
    PairSeeds,
    SeedShares,
    Session,
    SumRequest,
    UnmaskRequest,
    UnsafeRequest,
    decode,
    encode,
)
from perdure.privacy.secagg.server import SecAggServer, open_sum

FIVE, SIX = Group(5, task=9), Group(6, task=9)


def make_request(number: int, **more: Any) -> SumRequest:
    return FIVE.request(session=Session(9, number, nonce="x"), **more)


# ---- what the server sees


@pytest.mark.parametrize("bits", [32, 64])
def test_masked_values_are_uniform_and_unrelated_to_the_input(bits: int) -> None:
    group, size = Group(4, task=bits), 20_000
    chosen = group.request(fixed_point=FixedPoint(bits, 10, 4))
    ramp = np.linspace(-5, 5, size)  # as far from random as a row can be
    sums = Sums(group, chosen, dict.fromkeys(range(4), ramp), dict.fromkeys(range(4), 1.0))
    sums.uploads()
    for data in sums.received.values():
        row = decode(data, MaskedRow).row
        octets = np.bincount(row.view(np.uint8), minlength=256)
        assert stats.chisquare(octets).pvalue > 1e-4
        share = row.astype(np.float64) / 2.0**bits
        assert stats.kstest(share, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(share[3:], ramp[-len(share[3:]) :])[0, 1]) < 4 / np.sqrt(size)


def test_any_sum_of_fewer_than_all_uploads_stays_masked() -> None:
    group, size = Group(4, task=1), 20_000
    ramp = np.linspace(-5, 5, size)
    chosen = group.request(fixed_point=FixedPoint(32, 10, 4))
    sums = Sums(group, chosen, dict.fromkeys(range(4), ramp), dict.fromkeys(range(4), 1.0))
    sums.uploads()
    rows = [decode(data, MaskedRow).row for data in sums.received.values()]
    for left_out in range(4):
        part = sum(
            (row for k, row in enumerate(rows) if k != left_out), chosen.fixed_point.zeros(1)
        )
        assert stats.kstest(part / 2.0**32, "uniform").pvalue > 1e-4


def test_an_upload_holds_no_value_weight_or_secret_in_the_clear() -> None:
    sums = random_sums(FIVE, make_request(1), size=200)
    sums.uploads()
    for client, data in sums.received.items():
        secagg_client = FIVE.secagg_clients[client]
        row = row_of(_fields(sums, client), sums.weights[client])
        assert sums.request.fixed_point.encode(row).tobytes()[:16] not in data
        assert sums.values[client].tobytes()[:16] not in data
        assert secagg_client.keys.master not in data
        assert secagg_client.self_seed(sums.request) not in data
        for pair_secrets in secagg_client.pair_secrets(sums.request).values():
            assert pair_secrets.seed not in data
            assert pair_secrets.client_pad not in data


def _fields(sums: Sums, client: int) -> Any:
    return upload(sums.values[client])


def test_no_two_requests_share_a_mask() -> None:
    """Round, exchange, attempt, task, nonce, survivors and threshold all change the masks."""
    sessions = [
        Session(9, 0), Session(9, 1), Session(9, 0, 1), Session(9, 0, -1), Session(9, 0, 0, 1),
        Session(8, 0), Session(9, 0, nonce="a"), Session(9, 0, nonce="b"),
    ]  # fmt: skip
    requests = [FIVE.request(session=each) for each in sessions]
    requests += [
        FIVE.request(session=sessions[0], threshold=4),
        SIX.request(session=sessions[0]),
    ]
    masks = [_mask(each) for each in requests]
    for one in range(len(masks)):
        for other in range(one):
            assert not np.any(masks[one] == masks[other])


def _mask(chosen: SumRequest) -> Any:
    secagg_client = (FIVE if len(chosen.public_keys) == 5 else SIX).secagg_clients[0]
    secagg_client.forget_before((-1, 0, 0))  # or it would refuse a second sum of one round
    fields = {"u": Sum({"v": torch.zeros(50)})}
    return decode(secagg_client.upload(encode(chosen), fields, 0.0), MaskedRow).row


def test_seeds_revealed_in_one_round_open_no_other_round() -> None:
    """Seeds revealed when client 0 dropped out are not those of the round before."""
    before = random_sums(FIVE, make_request(2))
    before.uploads()
    after = random_sums(FIVE, make_request(3), gone=({0}, set(), set()))
    after.open()
    revealed = {
        seed for a in after.answered[0].values() for seed in decode(a, PairSeeds).seeds.values()
    }
    assert len(revealed) == 4
    used = {
        pair_secrets.seed
        for pair_secrets in FIVE.secagg_clients[0].pair_secrets(before.request).values()
    }
    assert not revealed & used


# ---- what a client refuses


def test_a_per_client_field_is_refused() -> None:
    fields = {"update": Each({"v": torch.ones(2)})}
    with pytest.raises(TypeError, match="'update' client by client"):
        FIVE.secagg_clients[0].upload(encode(make_request(4)), fields, 1.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: {"threshold": 2}, "not a majority"),
        (lambda c: {"threshold": 6}, "not a majority"),
        (lambda c: {"fixed_point": FixedPoint(64, 30, 4)}, "could overflow"),
        (
            lambda c: {"public_keys": {**c.public_keys, 0: c.public_keys[1]}},
            "does not include its key",
        ),
        (
            lambda c: {"public_keys": {k: v for k, v in c.public_keys.items() if k}},
            "does not include its key",
        ),
    ],
    ids=["low threshold", "high threshold", "overflow", "another key", "no key"],
)
def test_a_client_refuses_requests_that_do_not_protect_it(
    change: Callable[[SumRequest], Any], reason: str
) -> None:
    chosen = make_request(5)
    chosen = dataclasses.replace(chosen, **change(chosen))
    with pytest.raises(UnsafeRequest, match=reason):
        FIVE.secagg_clients[0].upload(encode(chosen), _fields(random_sums(FIVE), 0), 1.0)


def test_a_client_refuses_a_sum_of_two() -> None:
    pair = Group(2)
    with pytest.raises(UnsafeRequest, match="hides too little"):
        pair.secagg_clients[0].upload(
            encode(pair.request(threshold=2)), _fields(random_sums(pair), 0), 1.0
        )


def test_a_client_refuses_a_second_row_under_the_same_masks() -> None:
    sums, secagg_client = random_sums(FIVE, make_request(6)), FIVE.secagg_clients[0]
    text = encode(sums.request)
    first = secagg_client.upload(text, _fields(sums, 0), 1.0)
    assert (
        secagg_client.upload(text, _fields(sums, 0), 1.0) == first
    )  # a repetition reveals nothing
    with pytest.raises(UnsafeRequest, match="another row"):
        secagg_client.upload(text, _fields(sums, 0), 2.0)


def _dropout_request(sums: Sums, *survivors: int) -> bytes:
    return encode(DropoutRequest(sums.request.digest, survivors))


def _unmask_request(sums: Sums, receiver: int, *survivors: int) -> bytes:
    others = [survivor for survivor in survivors if survivor != receiver]
    sealed = {
        survivor: decode(sums.received[survivor], MaskedRow).sealed_shares[receiver]
        for survivor in others
    }
    return encode(UnmaskRequest(sums.request.digest, survivors, sealed))


def _uploaded(number: int) -> tuple[Sums, SecAggClient]:
    sums = random_sums(FIVE, make_request(number, threshold=3))
    sums.uploads()
    return sums, FIVE.secagg_clients[1]


@pytest.mark.parametrize(
    ("survivors", "reason"),
    [
        ((1, 2), "fewer than the threshold"),
        ((0, 2, 3), "not one of"),
        ((1, 1, 2, 3), "not one of"),
        ((1, 2, 3, 77), "listed again"),
    ],
)
def test_a_client_refuses_impossible_survivors(survivors: tuple[int, ...], reason: str) -> None:
    sums, secagg_client = _uploaded(7)
    with pytest.raises(UnsafeRequest, match=reason):
        secagg_client.answer(_dropout_request(sums, *survivors))


def test_a_client_that_dropped_out_cannot_be_listed_again() -> None:
    sums, secagg_client = _uploaded(8)
    secagg_client.answer(_dropout_request(sums, 1, 2, 3))
    with pytest.raises(UnsafeRequest, match="listed again"):
        secagg_client.answer(_dropout_request(sums, 0, 1, 2, 3))


def test_shares_are_given_for_one_set_of_survivors_only() -> None:
    sums, secagg_client = _uploaded(9)
    secagg_client.answer(_dropout_request(sums, 1, 2, 3, 4))
    with pytest.raises(UnsafeRequest, match="differ from those of its last answer"):
        secagg_client.answer(_unmask_request(sums, 1, 1, 2, 3))
    given = secagg_client.answer(_unmask_request(sums, 1, 1, 2, 3, 4))
    assert set(decode(given, SeedShares).shares) == {1, 2, 3, 4}
    assert secagg_client.answer(_unmask_request(sums, 1, 1, 2, 3, 4)) == given
    with pytest.raises(UnsafeRequest, match="final"):
        secagg_client.answer(_dropout_request(sums, 1, 2, 3))


def test_no_shares_are_given_of_a_client_that_dropped_out() -> None:
    sums, secagg_client = _uploaded(10)
    secagg_client.answer(_dropout_request(sums, 1, 2, 3, 4))
    request = decode(_unmask_request(sums, 1, 1, 2, 3, 4), UnmaskRequest)
    gone = decode(sums.received[0], MaskedRow).sealed_shares[1]
    more = dataclasses.replace(request, sealed_shares={**request.sealed_shares, 0: gone})
    with pytest.raises(MalformedMessage, match="each other survivor"):
        secagg_client.answer(encode(more))


def test_a_client_refuses_requests_about_other_sums() -> None:
    with pytest.raises(UnsafeRequest, match="did not upload to this sum"):
        Group(5, task=77).secagg_clients[0].answer(encode(DropoutRequest(bytes(32), (0, 1, 2))))


def test_a_restored_client_behaves_like_the_saved_one() -> None:
    sums, secagg_client = _uploaded(11)
    secagg_client.answer(_dropout_request(sums, 1, 2, 3))
    again = SecAggClient.from_tree(secagg_client.to_tree())
    request = _unmask_request(sums, 1, 1, 2, 3)
    assert again.answer(request) == secagg_client.answer(request)
    with pytest.raises(UnsafeRequest, match="listed again"):
        again.answer(_dropout_request(sums, 1, 2, 3, 4))
    secagg_client.forget_before((-1, 0, 0))
    with pytest.raises(UnsafeRequest, match="did not upload to this sum"):
        secagg_client.answer(request)


@pytest.mark.parametrize(
    "again",
    [{"attempt": 1}, {"nonce": "other"}, {"members": range(4)}, {"threshold": 5}],
    ids=lambda change: next(iter(change)),
)
def test_a_second_sum_of_one_round_is_refused(again: dict[str, Any]) -> None:
    """Sums over {0, 1, 2, 3, 4} and {0, 2, 3, 4} would give client 1's values as a difference."""
    group = Group(5, task=60)
    first = random_sums(group, group.request(session=Session(60, 4)))
    first.uploads()
    members = again.get("members", range(5))
    session = {key: value for key, value in again.items() if key in ("attempt", "nonce")}
    second = group.request(
        session=Session(60, 4, **session),
        public_keys={c: group.secagg_clients[c].keys.public for c in members},
        threshold=again.get("threshold", first.request.threshold),
    )
    for client in (0, 2, 3):
        restored = SecAggClient.from_tree(group.secagg_clients[client].to_tree())
        with pytest.raises(UnsafeRequest, match="took part in another sum of task 61, round 5"):
            restored.upload(encode(second), _fields(first, client), 1.0)
    next_round = group.request(session=Session(60, 5))
    assert group.secagg_clients[0].upload(encode(next_round), _fields(first, 0), 1.0)


# ---- tampered messages


def test_a_flipped_bit_anywhere_is_detected() -> None:
    sums = random_sums(FIVE, make_request(12))
    sums.uploads()
    data = sums.received[0]
    for index in range(0, len(data), 37):
        broken = bytearray(data)
        broken[index] ^= 1 << index % 8
        with pytest.raises(MalformedMessage):
            decode(bytes(broken), MaskedRow)


@pytest.mark.parametrize("data", [b"", b"short", bytes(40), b"\xff" * 200])
def test_garbage_is_refused(data: bytes) -> None:
    server = SecAggServer(make_request(13))
    server.receive_upload(0, data)
    assert list(server.refused) == [0]
    with pytest.raises(MalformedMessage):
        FIVE.secagg_clients[0].upload(data, {}, 1.0)
    with pytest.raises(MalformedMessage):
        FIVE.secagg_clients[0].answer(data)


def _changed(change: Callable[[MaskedRow], MaskedRow], number: int) -> tuple[Sums, SecAggServer]:
    """Uploads of which that of client 1 is changed, with a valid checksum."""
    sums = random_sums(FIVE, make_request(number, threshold=3))
    sums.uploads()
    server = SecAggServer(sums.request)
    for client, data in sums.received.items():
        message = decode(data, MaskedRow)
        server.receive_upload(client, encode(change(message) if client == 1 else message))
    return sums, server


def _without(table: Any, client: int) -> dict[int, bytes]:
    return {key: value for key, value in table.items() if key != client}


@pytest.mark.parametrize(
    "change",
    [
        lambda m: dataclasses.replace(m, client=2),
        lambda m: dataclasses.replace(m, request_digest=bytes(32)),
        lambda m: dataclasses.replace(m, row=m.row[:-1]),
        lambda m: dataclasses.replace(m, row=m.row.astype(np.uint32)),
        lambda m: dataclasses.replace(m, sealed_shares=_without(m.sealed_shares, 3)),
        lambda m: dataclasses.replace(m, pair_commitments=_without(m.pair_commitments, 3)),
        lambda m: dataclasses.replace(m, pads={}),
        lambda m: dataclasses.replace(
            m, layout=dataclasses.replace(m.layout, fields=("update", "other"))
        ),
    ],
    ids=["name", "call", "short row", "narrow row", "sealed", "commits", "pads", "layout"],
)
def test_an_upload_of_the_wrong_form_is_refused_and_the_others_are_summed(change: Any) -> None:
    sums, server = _changed(change, 14)
    expect(sums, open_sum(server, sums.ask), [0, 2, 3, 4])
    assert list(server.refused) == [1]


def test_a_wrong_pad_does_not_make_a_wrong_sum() -> None:
    """The seed that comes out is not the one committed to, so the clients are asked for shares."""
    pads = {peer: bytes(32) for peer in (0, 2, 3, 4)}
    sums, server = _changed(lambda m: dataclasses.replace(m, pads=pads), 15)
    expect(sums, open_sum(server, sums.ask), [0, 1, 2, 3, 4])
    assert len(sums.asked) == 1


def test_wrong_seeds_and_shares_are_refused() -> None:
    sums = random_sums(FIVE, make_request(16, threshold=3), gone=({0}, set(), set()))
    server = sums.uploads()
    answers = sums.ask(server.next_requests())
    seeds = decode(answers[1], PairSeeds)
    answers[1] = encode(dataclasses.replace(seeds, seeds={0: bytes(32)}))
    server.receive_answers(answers)
    assert "does not match its commitment" in server.refused[1]
    server.receive_answers(sums.ask(server.next_requests()))  # the others answer without client 1
    answers = sums.ask(server.next_requests())
    shares = decode(answers[2], SeedShares)
    answers[2] = encode(dataclasses.replace(shares, shares={k: bytes(33) for k in shares.shares}))
    with pytest.raises(BelowThreshold, match="do not belong together"):
        server.receive_answers(answers)


def test_a_late_upload_is_refused() -> None:
    sums = random_sums(FIVE, make_request(17), gone=({0}, set(), set()))
    server = sums.uploads()
    server.next_requests()
    late = FIVE.secagg_clients[0].upload(encode(sums.request), _fields(sums, 0), 1.0)
    server.receive_upload(0, late)
    assert "after the sum was closed" in server.refused[0]
    expect(sums, open_sum(server, sums.ask), [1, 2, 3, 4])


def test_a_late_upload_is_protected_only_without_single_message() -> None:
    """With single_message, a server that keeps a late upload learns its values; else it does not.

    docs/privacy.md says so. The server of this library drops late uploads.
    """
    for single_message, known in ((True, True), (False, False)):
        sums = random_sums(
            FIVE,
            make_request(38 if single_message else 18, single_message=single_message),
            gone=({0}, set(), set()),
        )
        sums.open()
        late = FIVE.secagg_clients[0].upload(
            encode(sums.request), _fields(sums, 0), sums.weights[0]
        )
        row = decode(late, MaskedRow).row.copy()
        for answer in sums.answered[0].values():
            message = decode(answer, PairSeeds)
            row -= expand_mask(
                message.seeds[0], len(row), sums.request.fixed_point
            )  # client 0 added them all
        covered = decode(late, MaskedRow).padded_seed
        for client, data in sums.received.items():
            pad = decode(data, MaskedRow).pads.get(0)
            if pad is not None and client != 0:
                covered = bytes(a ^ b for a, b in zip(covered, pad, strict=True))
        seed = covered if len(covered) == 32 else bytes(32)
        row -= expand_mask(seed, len(row), sums.request.fixed_point)
        truth = row_of(_fields(sums, 0), sums.weights[0])
        found = np.allclose(sums.request.fixed_point.decode(row), truth, atol=1e-8)
        assert found == known
