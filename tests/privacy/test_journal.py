"""Sums that a server asked for are found again by another process, whenever the first one died."""

from __future__ import annotations

import json

import pytest
from secagg_runs import Group

from perdure.core.errors import RunError
from perdure.privacy.secagg.journal import StartedSum, SumJournal
from perdure.privacy.secagg.messages import Session, Survivors

GROUP = Group(4)
FIRST = StartedSum(GROUP.request(session=Session(0, 1, nonce="a")), (0, 1, 2, 3))
SECOND = StartedSum(GROUP.request(session=Session(0, 1, attempt=1)), (0, 1, 2, 3), (5, 6))
LEFT, FINAL = Survivors((0, 1, 3), False), Survivors((0, 1, 3), True)
PLACE = (0, 1, 0)


def reopened(path):
    journal = SumJournal()
    journal.store_in(path)
    return journal


@pytest.fixture
def path(tmp_path):
    return tmp_path / "sums.jsonl"


def test_another_process_finds_the_last_attempt_and_who_was_left(path):
    journal = reopened(path)
    assert journal.at(PLACE) is None
    journal.add(FIRST)
    assert reopened(path).at(PLACE) == FIRST
    journal.add(SECOND)
    journal.add_survivors(PLACE, LEFT)
    journal.add_survivors(PLACE, FINAL)
    found = reopened(path).at(PLACE)
    assert found is not None
    assert found.request.digest == SECOND.request.digest
    assert (found.excluded, found.known) == ((5, 6), FINAL)
    assert reopened(path).at((0, 2, 0)) is None


def test_what_is_known_is_not_written_again(path):
    journal = reopened(path)
    journal.add(FIRST)
    for _ in range(3):
        journal.add_survivors(PLACE, LEFT)
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_line_that_was_not_finished_never_happened(path, cut):
    journal = reopened(path)
    journal.add(FIRST)
    whole = path.read_bytes()
    journal.add(SECOND)
    path.write_bytes(path.read_bytes()[:-cut])
    journal = reopened(path)
    assert journal.at(PLACE) == FIRST
    assert path.read_bytes() == whole
    journal.add(SECOND)
    assert reopened(path).at(PLACE) == SECOND


STRANGE = ["[]", "{}", '{"position": [0, 1, 0], "survivors": [], "final": true}', "[" * 100_000]


@pytest.mark.parametrize("line", STRANGE)
def test_a_file_that_was_altered_is_refused(path, line):
    path.write_text(line + "\n")
    with pytest.raises(RunError, match="line 1 is not a secure sum"):
        reopened(path)


@pytest.mark.parametrize("key", ["position", "sampled", "excluded"])
@pytest.mark.parametrize("value", ["012", ["0", "1", "2"], [10**400, 0, 0], [0.0, 1, 0], 7, None])
def test_numbers_of_another_type_are_refused(path, key, value):
    reopened(path).add(FIRST)
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}) + "\n")
    with pytest.raises(RunError, match="line 1 is not a secure sum"):
        reopened(path)
