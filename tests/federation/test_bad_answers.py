"""A node that replies with something else than was asked is left out, with its name."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from in_process import in_process_engine

from perdure.contract import ClientResult, Exchange, Method, Sum, Train
from perdure.contract.uploads import FailedUpload
from perdure.core.errors import RunError
from perdure.federation.messages import (
    BadMessage,
    NodeRequest,
    RoundPosition,
    pack,
    read_header,
    unpack,
)
from perdure.federation.server.replies import UploadForms
from perdure.runs.run import run

CONFIG = {
    "stream": {"kind": "split", "tasks": 1},
    "clients": {"count": 4},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 1, "batch_size": 64},
    "data": {"limit": 160},
    "engine": {"kind": "flower"},
    "device": "cpu",
}


def changed(reply: bytes, change) -> bytes:
    """Return the reply with a changed upload."""
    tree = unpack(reply)
    (upload,) = tree["uploads"].values()
    change(upload)
    return pack(tree)


def scaled(upload):
    name = next(iter(upload["update"]["value"]))
    upload["update"]["value"][name] = upload["update"]["value"][name] * float("nan")


def reshaped(upload):
    name = next(iter(upload["update"]["value"]))
    upload["update"]["value"][name] = torch.zeros(3, 3)


def doubled(upload):
    name = next(iter(upload["update"]["value"]))
    upload["update"]["value"][name] = upload["update"]["value"][name].double()


def renamed(upload):
    upload["update"]["value"]["secret"] = torch.zeros(1)


def lacking(upload):
    upload["update"]["value"].pop(next(iter(upload["update"]["value"])))


def mistyped(upload):
    upload["update"]["type"] = "Mean"


def weighed(upload):
    upload["update"]["weight"] = -1.0


def outweighed(upload):
    upload["update"]["weight"] = 10**400  # no float


def added(upload):
    upload["more"] = {"type": "Sum", "weight": None, "value": {"x": torch.zeros(2)}}


def bare(upload):
    upload["update"]["value"] = [1, 2]


@dataclass(frozen=True)
class TwoForms(Method):
    """FedAvg with two task-end exchanges whose fields differ."""

    def exchanges(self, context):
        one = Exchange("one", client_work=self.one, aggregate=self.ignore)
        return [Train(), one, Exchange("two", client_work=self.two, aggregate=self.ignore)]

    def one(self, client):
        return ClientResult({"x": Sum({"x": torch.ones(2)})})

    def two(self, client):
        return ClientResult({"x": Sum({"x": torch.ones(3)})})

    def ignore(self, server, uploads, context):
        return server


CHANGES = {
    reshaped: "must be torch.float32",
    doubled: "torch.float64",
    renamed: "'secret' is not in the model",
    lacking: "is missing",
    mistyped: "neither a Sum with a valid weight nor an Each",
    weighed: "neither a Sum with a valid weight nor an Each",
    outweighed: "neither a Sum with a valid weight nor an Each",
    added: "differ from those of the other clients",
    bare: "not a mapping of tensors",
}


def spoiled(tmp_path, spoil):
    engine, transport = in_process_engine(CONFIG, tmp_path)
    transport.spoil = lambda node, request, reply: spoil(reply) if node == 2 else reply
    return run(CONFIG, out=tmp_path / "run", engine=engine).values


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_upload_of_the_wrong_form_is_left_out_with_a_reason(change, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        values = spoiled(tmp_path, lambda reply: changed(reply, change))
    (failure,) = values["failures"]
    assert failure["client"] == 2
    assert CHANGES[change] in failure["reason"]
    assert "client 2 is left out" in caplog.text
    assert values["client_updates"] == 3
    assert values["missing_reports"] == 0


def test_values_that_are_not_finite_are_rejected(tmp_path):
    values = spoiled(tmp_path, lambda reply: changed(reply, scaled))
    assert values["rejected_updates"] == [{"task": 0, "round": 0, "client": 2}]
    assert values["client_updates"] == 3


@pytest.mark.parametrize("garbage", [b"", b"\x00" * 64, b"{}", bytes(range(256)) * 9, pack({})])
def test_a_reply_of_garbage_is_left_out(garbage, tmp_path):
    values = spoiled(tmp_path, lambda reply: garbage)
    assert [failure["client"] for failure in values["failures"]] == [2]
    assert values["client_updates"] == 3


def test_the_model_is_that_of_the_clients_that_were_left(tmp_path):
    honest = {**CONFIG, "engine": {"kind": "serial"}}
    values = spoiled(tmp_path, lambda reply: b"garbage")
    assert values["model_sha256"] != run(honest).values["model_sha256"]
    assert np.isfinite(values["metrics"]["task_agnostic"]["ACC"])


def test_a_client_without_a_reply_is_missing_and_the_reason_is_recorded(tmp_path):
    values = spoiled(tmp_path, lambda reply: FailedUpload(2, "no answer within 600 s"))
    assert values["missing_reports"] == 1
    assert values["failures"][0]["reason"] == "no answer within 600 s"


def test_a_run_without_any_reply_stops_and_can_be_resumed(tmp_path):
    engine, transport = in_process_engine(CONFIG, tmp_path)
    transport.spoil = lambda node, request, reply: FailedUpload(node, "gone")
    with pytest.raises(RunError, match="no client sent a valid upload"):
        run(CONFIG, out=tmp_path / "run", engine=engine)
    transport.spoil = lambda node, request, reply: reply
    assert run(CONFIG, out=tmp_path / "run", resume=True, engine=engine).values["rounds"] == 1


def test_a_node_refuses_clients_that_are_not_its_own(tmp_path):
    _, transport = in_process_engine(CONFIG, tmp_path)
    with pytest.raises(BadMessage, match="client 1 is not at node 0"):
        transport.node(0).serve(NodeRequest("train", RoundPosition(0), (1,)), pack({}))
    with pytest.raises(BadMessage, match="client -4 is not at node 0"):
        transport.node(0).serve(NodeRequest("train", RoundPosition(0), (-4,)), pack({}))
    with pytest.raises(BadMessage, match="the run has no task 2"):
        transport.node(0).serve(NodeRequest("train", RoundPosition(1), (0,)), pack({}))


def requests(tmp_path, method=None):
    """Return a node, and the requests with their bodies that it served."""
    engine, transport = in_process_engine(
        {**CONFIG, "method": {"kind": method or "fedavg"}}, tmp_path
    )
    seen = []
    exchange = transport.send_and_receive

    def remember(headers, body, limit):
        seen.append((read_header(headers[0]), body))
        return exchange(headers, body, limit)

    transport.send_and_receive = remember
    run(transport.config, engine=engine)
    return transport.node(0), seen


POSITIONS = {
    "task": [-1, 1, 0.0, True, "0", None, 10**9],
    "round": [-1, 1, 2, 0.5],
    "rounds": [0, 2, -1, 10**7],
    "clients_with_data": [-1, 5, 2.0],
    "attempt": [-1, "1"],
    "exchange": [1, -1, 10**6, "0"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in POSITIONS.items() for value in values]
)
def test_a_node_refuses_a_position_that_the_run_does_not_have(name, value, tmp_path):
    node, ((request, body), *_) = requests(tmp_path)
    node.serve(request, body)
    assert request.kind == "train"
    with pytest.raises(BadMessage):
        node.serve(replace(request, position=replace(request.position, **{name: value})), body)


def test_a_node_serves_the_exchanges_that_the_method_declares_and_no_others(tmp_path):
    node, seen = requests(tmp_path, "fot")
    (request, body) = seen[-1]
    assert (request.kind, request.position.exchange, request.position.round) == ("exchange", 1, 1)
    node.serve(request, body)
    for change in ({"exchange": 2}, {"exchange": 0}, {"exchange": -1, "round": 0}, {"round": 0}):
        with pytest.raises(BadMessage, match="is no part of task 1"):
            node.serve(replace(request, position=replace(request.position, **change)), body)


@pytest.mark.parametrize("part", ["params", "buffers", "broadcast"])
def test_a_node_refuses_an_incomplete_body(part, tmp_path):
    node, ((request, body), *_) = requests(tmp_path)
    rest = {name: value for name, value in unpack(body).items() if name != part}
    with pytest.raises(BadMessage, match=f"the request has no {part}"):
        node.serve(request, pack(rest))


def test_a_form_of_another_exchange_does_not_shut_out_the_others(tmp_path):
    """Two exchanges of one task have separate forms; a replayed upload differs from the others."""
    config = {**CONFIG, "method": {"kind": f"{__name__}.TwoForms"}}
    engine, transport = in_process_engine(config, tmp_path)
    first = {}

    def replay(node, request, reply):
        if node == 2 and request.kind == "exchange":
            return first.setdefault("reply", reply)
        return reply

    transport.spoil = replay
    values = run(config, engine=engine).values
    (failure,) = values["failures"]
    assert failure["client"] == 2
    assert "differ from those of the other clients" in failure["reason"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "delete", "position": {}}', "\x00"])
def test_a_header_that_cannot_be_read_is_refused(text):
    with pytest.raises(BadMessage):
        read_header(text)


HONEST, OTHER = ({"update": Sum({"w": torch.zeros(n)})} for n in (2, 3))


def accepted(forms, uploads, place=(0, 0)):
    found = forms.drop_others(place, uploads)
    return [client for client, upload in found.items() if upload is uploads[client]]


def test_the_form_of_earlier_rounds_counts_more_than_a_majority():
    forms = UploadForms()
    assert accepted(forms, dict.fromkeys(range(3), HONEST)) == [0, 1, 2]
    assert accepted(forms, {0: HONEST, 1: OTHER, 2: OTHER}) == [0]
    assert accepted(forms, {0: HONEST, 1: OTHER, 2: OTHER}, place=(0, 1)) == [1, 2]


def test_a_client_that_was_alone_in_a_round_does_not_decide_the_form():
    forms = UploadForms()
    assert accepted(forms, {0: OTHER}) == [0]
    assert accepted(forms, {0: OTHER, 1: HONEST, 2: HONEST}) == [1, 2]
    assert accepted(forms, {0: OTHER, 3: HONEST}) == [3]


def test_a_form_that_changes_with_the_round_is_that_of_most_clients():
    forms = UploadForms()
    assert accepted(forms, {0: HONEST, 1: HONEST, 2: OTHER}) == [0, 1]
    third = {"update": Sum({"w": torch.zeros(4)})}
    assert accepted(forms, dict.fromkeys(range(3), third)) == [0, 1, 2]
    assert accepted(forms, {0: {}, 1: FailedUpload(1, "late"), 2: third}) == [0, 1, 2]
