"""Following a run that another process trains."""

from __future__ import annotations

import logging

import pytest

from perdure.core.errors import RunError, UserError
from perdure.federation.admin.submission import Submission
from perdure.federation.admin.trial import EventForwarder, follow

ROUND = '{"event": "round", "task": 0, "round": %d, "bytes": {"up": 1, "down": 1}}'
TASK = '{"event": "task", "task": 0, "bytes": {"up": 1, "down": 1}}'


def test_rounds_are_counted_from_the_checkpoint_that_a_run_was_resumed_at(tmp_path):
    lines, seen = [f"{ROUND % number}\n" for number in range(5)], []
    log = tmp_path / "events.jsonl"
    log.write_text("".join(lines[:3]))
    events = EventForwarder(tmp_path)
    for count in (3, 2, 4, 5):
        log.write_text("".join(lines[:count]))
        events.forward(lambda state, event: seen.append((state.counters.rounds, event["round"])))
    assert seen == [(3, 2), (4, 3), (5, 4)]


@pytest.mark.parametrize(("state", "error"), [("refused", UserError), ("stopped", RunError)])
def test_how_it_ended_is_how_the_command_ends(state, error, tmp_path, caplog):
    submission = Submission(tmp_path)
    submission.log.write_text("")
    submission.record_outcome(state, "because of this")
    with pytest.raises(error, match="because of this"):
        follow(submission, tmp_path, [])


def test_warnings_are_passed_on(tmp_path, caplog):
    submission = Submission(tmp_path)

    def watch(state, event):
        seen.append((state.counters.rounds, state.task, state.round, event["event"]))

    seen = []
    lines = [ROUND % 0, TASK]

    class Writer:
        def check(self):
            (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
            submission.log.write_text("12:00 INFO begun\n12:01 WARNING client 2 is left out\n")
            (tmp_path / "config.yaml").write_text("{}")
            (tmp_path / "result.json").write_text('{"rounds": 1}')
            submission.record_outcome("done")

    with caplog.at_level(logging.INFO):
        assert follow(submission, tmp_path, [Writer()], watch) == {"rounds": 1}
    assert seen == [(1, 0, 1, "round"), (1, 1, 0, "task")]
    assert [record.message for record in caplog.records] == ["client 2 is left out"]
