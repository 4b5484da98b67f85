"""Messages of secure sums that were tampered with, on both sides, with checksums that are right."""

from __future__ import annotations

import hashlib
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import campaign, mutated_bytes, mutated_json, mutated_message
from secagg_runs import Group, Sums, random_sums, upload

from perdure.core.errors import RunError
from perdure.privacy.secagg.client import SecAggClient
from perdure.privacy.secagg.journal import StartedSum, SumJournal
from perdure.privacy.secagg.keys import is_public_key
from perdure.privacy.secagg.messages import (
    BelowThreshold,
    MalformedMessage,
    Session,
    Survivors,
    UnsafeRequest,
    encode,
)
from perdure.privacy.secagg.server import SecAggServer, open_sum

GROUP = Group(4, task=3)


def mutated_sum_message(rng: random.Random, data: bytes) -> bytes:
    """Return a message whose content was changed; its checksum is right, most of the time."""
    if rng.random() < 0.05:
        return mutated_bytes(rng, data)
    body = mutated_message(rng, data[16:])
    return hashlib.sha256(body).digest()[:16] + body


@cache
def honest(single_message: bool, drops: bool) -> Sums:
    session = Session(3, 2 * single_message + drops)  # clients take part in one sum of a round
    request = GROUP.request(session=session, single_message=single_message, threshold=3)
    gone: Any = ({3}, set(), set()) if drops else (set(), set(), set())
    sums = random_sums(GROUP, request, gone=gone)
    sums.open()
    return sums


def cases() -> list[Sums]:
    return [honest(single, drops) for single in (True, False) for drops in (True, False)]


# ---- the server


def open_with_one_hostile_client(rng: random.Random, sums: Sums) -> None:
    """Open a sum in which one client sends other messages than it should."""
    hostile, server = rng.choice([1, 2]), SecAggServer(sums.request)
    for client, data in sums.received.items():
        is_spoiled = client == hostile and rng.random() < 0.7
        server.receive_upload(client, mutated_sum_message(rng, data) if is_spoiled else data)
        server.field_bytes(client)
    answers = iter(sums.answered)

    def ask(requests: dict[int, bytes]) -> dict[int, bytes]:
        try:
            found = dict(next(answers))
        except StopIteration:
            return {}
        if hostile in found:
            found[hostile] = mutated_sum_message(rng, found[hostile])
        return {client: data for client, data in found.items() if client in requests}

    collected = open_sum(server, ask)
    for values in collected.sums.values():
        assert all(np.isfinite(value.numpy()).all() for value in values.values())


def test_the_server_opens_a_sum_or_is_below_the_threshold() -> None:
    campaign(
        "server", cases(), lambda rng, sums: sums, open_with_one_hostile_client, (BelowThreshold,)
    )


# ---- a client


def client_messages() -> list[tuple[Sums, bytes, bool]]:
    """Return the requests to client 0: for uploads, and about sums that it uploaded to."""
    found = []
    for sums in cases():
        found.append((sums, encode(sums.request), True))
        found += [(sums, asked[0], False) for asked in sums.asked if 0 in asked]
    return found


def answer(rng: random.Random, message: tuple[Sums, bytes, bool]) -> None:
    sums, data, is_upload = message
    client = SecAggClient(GROUP.secagg_clients[0].keys)
    fields = upload(sums.values[0])
    if is_upload:
        client.upload(data, fields, 2.0)
    else:
        client.upload(encode(sums.request), fields, 2.0)
        client.answer(data)


def mutate(rng: random.Random, message: tuple[Sums, bytes, bool]) -> tuple[Sums, bytes, bool]:
    sums, data, is_upload = message
    return sums, mutated_sum_message(rng, data), is_upload


def test_a_client_answers_or_refuses() -> None:
    refused = campaign(
        "clients", client_messages(), mutate, answer, (MalformedMessage, UnsafeRequest)
    )
    assert refused


# ---- the sums that a server stored


def test_stored_sums_are_read_or_refused(tmp_path: Path) -> None:
    path, journal = tmp_path / "sums.jsonl", SumJournal()
    journal.store_in(path)
    started = StartedSum(honest(True, False).request, (0, 1, 2, 3), (5, 6))
    journal.add(started)
    journal.add_survivors(started.request.session.position, Survivors((0, 1, 3), True))
    lines = path.read_text().splitlines()

    def read(rng: random.Random, line: str) -> None:
        path.write_bytes(f"{lines[0]}\n{line}\n".encode("utf-8", "surrogatepass"))
        SumJournal().store_in(path)

    assert campaign("stored", lines, mutated_json, read, (RunError,))


# ---- keys


def test_only_keys_that_others_can_use_are_valid() -> None:
    low_order = [bytes(32), b"\x01" + bytes(31), b"\xec" + b"\xff" * 30 + b"\x7f"]
    keys = [client.keys.public for client in GROUP.secagg_clients.values()]

    def check(rng: random.Random, key: bytes) -> None:
        if is_public_key(key):
            GROUP.secagg_clients[0].keys.pair_secrets(9, key, bytes(32))

    campaign("keys", keys + low_order, mutated_bytes, check, messages=500)
    assert all(is_public_key(key) for key in keys)
    assert not any(is_public_key(key) for key in [*low_order, b"", bytes(31), bytes(33)])
