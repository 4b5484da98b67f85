"""The way to the nodes over Flower's grid, with a grid that only pretends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flwr.app import Error, Message
from flwr.supercore.task_identity import TaskIdentity

from perdure.contract.upload_collector import FailedUpload
from perdure.flower import apps
from perdure.flower.apps import FlowerTransport, _content, _read


class PretendGrid:
    """Nodes that answer as told: a function of the order's head and body, or nothing."""

    def __init__(self, nodes, answers):
        self.nodes, self.answers = nodes, answers
        self.sent, self.pulled = {}, 0

    def get_nodes(self):
        return [SimpleNamespace(name=name, node_id=number) for name, number in self.nodes.items()]

    def push_messages(self, messages):
        for place, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{place}"
            self.sent[f"m{place}"] = message
        return list(self.sent)

    def pull_messages(self, wanted):
        self.pulled += 1
        replies = []
        for number in wanted:
            message = self.sent[number]
            answer = self.answers.get(message.metadata.dst_node_id)
            if answer is not None:
                replies.append(Message(answer(*_read(message.content)), reply_to=message))
        return replies


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(apps, "_POLL", 0.01)
    monkeypatch.setattr(apps, "_GRACE", 0.05)
    for name in ("_run_id", "_node_id", "_task_id"):  # as in a process that Flower starts
        monkeypatch.setattr(TaskIdentity, name, 1)


def echo(head, body):
    return _content("", head.encode() + b"|" + body)


def test_each_node_gets_its_head_and_all_the_same_body():
    grid = PretendGrid({"node-0": 70, "node-1": 71, "other": 9}, {70: echo, 71: echo})
    found = FlowerTransport(grid, 5.0).send_and_receive({0: "a", 1: "b"}, b"body", 100)
    assert found == {0: b"a|body", 1: b"b|body"}
    bodies = {message.content.array_records["body"].object_id for message in grid.sent.values()}
    assert len(bodies) == 1  # stored and sent once


def test_who_is_late_gone_or_unknown_has_a_reason():
    grid = PretendGrid({"node-0": 70, "node-1": 71}, {70: echo})
    link = FlowerTransport(grid, 0.3)
    found = link.send_and_receive({0: "a", 1: "b", 2: "c"}, b"", 100)
    assert found[0] == b"a|"
    assert found[1] == FailedUpload(1, "no answer within 0.3 s")
    assert found[2] == FailedUpload(2, "node-2 is not connected")


def test_a_node_that_never_came_is_waited_for_once(monkeypatch):
    grid = PretendGrid({"node-0": 70}, {70: echo})
    waits = []
    monkeypatch.setattr(apps.time, "sleep", waits.append)
    monkeypatch.setattr(apps.time, "monotonic", lambda: sum(waits))
    link = FlowerTransport(grid, 600.0)
    for most in (600.0, apps._GRACE):
        waits.clear()
        found = link.send_and_receive({0: "a", 1: "b"}, b"", 100)
        assert found == {0: b"a|", 1: FailedUpload(1, "node-1 is not connected")}
        assert most <= sum(waits) <= most + 1


def test_a_node_that_was_there_is_not_waited_for_as_long():
    grid = PretendGrid({"node-0": 70}, {70: echo})
    link = FlowerTransport(grid, 3600.0)
    assert link.send_and_receive({0: "a"}, b"", 100) == {0: b"a|"}
    grid.nodes = {}
    assert link.send_and_receive({0: "a"}, b"", 100) == {
        0: FailedUpload(0, "node-0 is not connected")
    }


@pytest.mark.parametrize(
    ("answer", "reason", "answered"),
    [
        (lambda head, body: Error(4, "it\nbroke\x1b[31m"), "node-0: it broke [31m", False),
        (lambda head, body: _content("refused it", b""), "node-0: refused it", True),
        (lambda head, body: _content("x" * 9999, b""), "node-0: " + "x" * 300, True),
        (
            lambda head, body: _content("", b"12345"),
            "node-0: an answer of 5 bytes, allowed: 4",
            True,
        ),
    ],
)
def test_answers_that_cannot_be_used(answer, reason, answered):
    grid = PretendGrid({"node-0": 70}, {70: answer})
    assert FlowerTransport(grid, 5.0).send_and_receive({0: "a"}, b"", 4) == {
        0: FailedUpload(0, reason, answered)
    }


def gone(head, body):
    return Error(5, "Node Unavailable")


def test_a_whole_federation_that_was_restarted_is_waited_for():
    """Flower still takes the last lives of the nodes for alive when the first order goes out."""
    grid = PretendGrid({"node-0": 70, "node-1": 71}, {70: gone, 71: gone})
    pull = grid.pull_messages

    def then_back(wanted):
        replies = pull(wanted)
        grid.answers = {70: echo, 71: echo}
        return replies

    grid.pull_messages = then_back
    found = FlowerTransport(grid, 5.0).send_and_receive({0: "a", 1: "b"}, b"", 100)
    assert found == {0: b"a|", 1: b"b|"}


def test_it_is_tried_twice_and_only_if_nobody_answers():
    grid = PretendGrid({"node-0": 70, "node-1": 71}, {70: gone, 71: gone})
    lost = {node: FailedUpload(node, f"node-{node}: Node Unavailable") for node in (0, 1)}
    assert FlowerTransport(grid, 5.0).send_and_receive({0: "a", 1: "b"}, b"", 100) == lost
    assert grid.pulled == 2
    grid.answers[71], grid.pulled = echo, 0
    assert FlowerTransport(grid, 5.0).send_and_receive({0: "a", 1: "b"}, b"", 100) == lost | {
        1: b"b|"
    }
    assert grid.pulled == 1
