"""What is told of a run that another process leads."""

from __future__ import annotations

import logging

import pytest

from perdure.core.errors import RunError, UserError
from perdure.flower.submission import Submission
from perdure.flower.trial import Tail, follow


def test_only_whole_lines_and_only_new_ones(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"old\n")
    tail = Tail(path)
    path.write_bytes(b"old\nnew\nhal")
    assert tail.new() == [b"new"]
    assert tail.new() == []
    path.write_bytes(b"old\nnew\nhalf\n")
    assert tail.new() == [b"half"]


@pytest.mark.parametrize(("state", "error"), [("refused", UserError), ("stopped", RunError)])
def test_how_it_ended_is_how_the_command_ends(state, error, tmp_path, caplog):
    submission = Submission(tmp_path)
    submission.log.write_text("")
    submission.ended(state, "because of this")
    with pytest.raises(error, match="because of this"):
        follow(submission, tmp_path, [])


def test_warnings_are_passed_on(tmp_path, caplog):
    submission = Submission(tmp_path)

    def watch(state, event):
        seen.append((state.counters.rounds, state.task, state.round, event["event"]))

    seen = []
    lines = ['{"event": "round", "task": 0, "round": 0}', '{"event": "task", "task": 0}']

    class Writer:
        def check(self):
            (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
            submission.log.write_text("12:00 INFO begun\n12:01 WARNING client 2 is left out\n")
            (tmp_path / "config.yaml").write_text("{}")
            (tmp_path / "result.json").write_text('{"rounds": 1}')
            submission.ended("done")

    with caplog.at_level(logging.INFO):
        assert follow(submission, tmp_path, [Writer()], watch) == {"rounds": 1}
    assert seen == [(1, 0, 1, "round"), (1, 1, 0, "task")]
    assert [record.message for record in caplog.records] == ["client 2 is left out"]
