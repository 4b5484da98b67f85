"""Reading lines that another process appends."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.core.event_log import EventTotals, LineReader


def test_only_complete_and_new_lines_are_returned(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    reader = LineReader(path, from_end=True)
    path.write_bytes(b"old\nnew\nhal")
    assert reader.read_new() == [b"new"]
    assert reader.read_new() == []
    path.write_bytes(b"old\nnew\nhalf\n")
    assert reader.read_new() == [b"half"]


@pytest.mark.parametrize("from_end", [True, False])
def test_a_shortened_file_is_read_from_its_start(from_end: bool, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree\n")
    reader = LineReader(path, from_end)
    assert reader.read_new() == ([] if from_end else [b"one", b"two", b"three"])
    assert not reader.was_truncated
    path.write_bytes(b"one\nother\n")
    assert reader.read_new() == [b"one", b"other"]
    assert reader.was_truncated
    path.write_bytes(b"one\nother\nlast\n")
    assert reader.read_new() == [b"last"]
    assert not reader.was_truncated


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert LineReader(tmp_path / "log").read_new() == []


def test_bytes_of_earlier_tasks_are_added_to_those_of_the_current_one() -> None:
    totals = EventTotals()
    for kind, up in (("round", 3), ("round", 6), ("task", 8), ("round", 2)):
        totals.add({"event": kind, "bytes": {"up": up, "down": 10 * up}})
    assert (totals.rounds, totals.bytes) == (3, {"up": 10, "down": 100})
