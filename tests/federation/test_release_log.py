"""The log of what left a node: no entry is lost in silence, and an altered one is left out."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.federation.node.run import ReleaseLog, summarize

ENTRY = {"run": "ab", "task": 1, "kind": "train", "bytes": 7}


@pytest.fixture
def small_files() -> Iterator[None]:
    """Let the operating system write at most 20 bytes to a file, as a disk that is nearly full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_entry_that_does_not_fit_on_the_disk_is_an_error(
    tmp_path: Path, small_files: None
) -> None:
    """The node writes the entry before the reply leaves, which then does not leave."""
    with pytest.raises(OSError, match="File too large"):
        ReleaseLog(tmp_path / "log").add([ENTRY])


def test_the_entry_after_a_cut_line_can_be_read(tmp_path: Path) -> None:
    log = ReleaseLog(tmp_path / "log")
    log.add([ENTRY])
    with log.path.open("a") as file:
        file.write('{"run": "ab", "ta')
    log.add([ENTRY])
    log.add([ENTRY])
    assert [entry["bytes"] for entry in log.entries()] == [7, 7, 7]
    assert len(log.path.read_text().splitlines()) == 4


ALTERED = [
    {"task": "x"}, {"task": None}, {"bytes": "a"}, {"bytes": float("inf")}, {"fields": 3},
    {"fields": {"a": 1}}, {"fields": {"a": {}}}, {"fields": {"a": {"bytes": 1}}, "noise": "much"},
]  # fmt: skip


@pytest.mark.parametrize("change", ALTERED)
def test_an_altered_entry_is_left_out(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "log"
    lines = [json.dumps(entry).encode() for entry in (ENTRY, {**ENTRY, **change}, ENTRY)]
    path.write_bytes(b"\n".join([*lines, b"\xff\xfe"]))
    (row,) = summarize(ReleaseLog(path).entries())
    assert (row.replies, row.bytes, row.fields) == (2, 14, "")
