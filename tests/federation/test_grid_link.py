"""The transport to the nodes, over a fake grid."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from flwr.app import Error, Message
from flwr.supercore.task_identity import TaskIdentity

from perdure.contract.uploads import FailedUpload
from perdure.federation.server import transport as flower_transport
from perdure.federation.server.transport import FlowerTransport, make_content, read_content


class FakeGrid:
    """Nodes that reply with a given function of header and body, or not at all."""

    def __init__(self, nodes, answers):
        self.nodes, self.answers = nodes, answers
        self.sent, self.pulled = {}, 0

    def get_nodes(self):
        return [SimpleNamespace(name=name, node_id=number) for name, number in self.nodes.items()]

    def push_messages(self, messages):
        for index, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"m{index}"
            self.sent[f"m{index}"] = message
        return list(self.sent)

    def pull_messages(self, wanted):
        self.pulled += 1
        replies = []
        for number in wanted:
            message = self.sent[number]
            answer = self.answers.get(message.metadata.dst_node_id)
            if answer is not None:
                replies.append(Message(answer(*read_content(message.content)), reply_to=message))
        return replies


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(flower_transport, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(flower_transport, "RECONNECT_SECONDS", 0.05)
    for name in ("_run_id", "_node_id", "_task_id"):  # as in a process that Flower starts
        monkeypatch.setattr(TaskIdentity, name, 1)


def echo(header, body):
    return make_content("", header.encode() + b"|" + body)


def test_each_node_gets_its_header_and_the_same_body():
    grid = FakeGrid({"node-0": 70, "node-1": 71, "other": 9}, {70: echo, 71: echo})
    replies = FlowerTransport(grid, 5.0).send_and_receive({0: "a", 1: "b"}, b"body", 100)
    assert replies == {0: b"a|body", 1: b"b|body"}
    bodies = {message.content.array_records["body"].object_id for message in grid.sent.values()}
    assert len(bodies) == 1  # stored and sent once


def test_late_and_unconnected_nodes_are_failures_with_a_reason():
    grid = FakeGrid({"node-0": 70, "node-1": 71}, {70: echo})
    transport = FlowerTransport(grid, 0.3)
    replies = transport.send_and_receive({0: "a", 1: "b", 2: "c"}, b"", 100)
    assert replies[0] == b"a|"
    assert replies[1] == FailedUpload(1, "no answer within 0.3 s")
    assert replies[2] == FailedUpload(2, "node-2 is not connected")


def test_a_node_that_never_connected_is_waited_for_once(monkeypatch):
    grid = FakeGrid({"node-0": 70}, {70: echo})
    waits = []
    monkeypatch.setattr(flower_transport.time, "sleep", waits.append)
    monkeypatch.setattr(flower_transport.time, "monotonic", lambda: sum(waits))
    transport = FlowerTransport(grid, 6.0)
    for most in (6.0, flower_transport.RECONNECT_SECONDS):
        waits.clear()
        replies = transport.send_and_receive({0: "a", 1: "b"}, b"", 100)
        assert replies == {0: b"a|", 1: FailedUpload(1, "node-1 is not connected")}
        assert most <= sum(waits) <= most + 0.1


def test_a_node_that_was_connected_is_waited_for_briefly():
    grid = FakeGrid({"node-0": 70}, {70: echo})
    transport = FlowerTransport(grid, 3600.0)
    assert transport.send_and_receive({0: "a"}, b"", 100) == {0: b"a|"}
    grid.nodes = {}
    assert transport.send_and_receive({0: "a"}, b"", 100) == {
        0: FailedUpload(0, "node-0 is not connected")
    }


@pytest.mark.parametrize(
    ("answer", "reason", "answered"),
    [
        (lambda header, body: Error(4, "it\nbroke\x1b[31m"), "node-0: it broke [31m", False),
        (lambda header, body: make_content("refused it", b""), "node-0: refused it", True),
        (lambda header, body: make_content("x" * 9999, b""), "node-0: " + "x" * 300, True),
        (
            lambda header, body: make_content("", b"12345"),
            "node-0: the reply must be at most 4 bytes, got 5",
            True,
        ),
    ],
)
def test_an_unusable_reply_is_a_failure_with_a_reason(answer, reason, answered):
    grid = FakeGrid({"node-0": 70}, {70: answer})
    assert FlowerTransport(grid, 5.0).send_and_receive({0: "a"}, b"", 4) == {
        0: FailedUpload(0, reason, answered)
    }


def gone(header, body):
    return Error(5, "Node Unavailable")


def test_a_whole_federation_that_was_restarted_is_waited_for():
    """At the first request Flower still considers the previous connections alive."""
    grid = FakeGrid({"node-0": 70, "node-1": 71}, {70: gone, 71: gone})
    pull = grid.pull_messages

    def then_back(wanted):
        replies = pull(wanted)
        grid.answers = {70: echo, 71: echo}
        return replies

    grid.pull_messages = then_back
    replies = FlowerTransport(grid, 5.0).send_and_receive({0: "a", 1: "b"}, b"", 100)
    assert replies == {0: b"a|", 1: b"b|"}


def test_a_request_is_repeated_once_and_only_if_no_node_replies():
    grid = FakeGrid({"node-0": 70, "node-1": 71}, {70: gone, 71: gone})
    lost = {node: FailedUpload(node, f"node-{node}: Node Unavailable") for node in (0, 1)}
    assert FlowerTransport(grid, 5.0).send_and_receive({0: "a", 1: "b"}, b"", 100) == lost
    assert grid.pulled == 2
    grid.answers[71], grid.pulled = echo, 0
    assert FlowerTransport(grid, 5.0).send_and_receive({0: "a", 1: "b"}, b"", 100) == lost | {
        1: b"b|"
    }
    assert grid.pulled == 1
