"""A node that answers with something else than what was asked is named and left out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import here

from perdure.contract import ClientResult, Exchange, Method, Sum, Train
from perdure.contract.upload_collector import FailedUpload
from perdure.core.errors import RunError
from perdure.execution.runner import run
from perdure.flower.engine import FlowerEngine
from perdure.flower.protocol import BadMessage, NodeRequest, RoundPosition, pack, read_head, unpack

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
    """The reply with one tensor of its update replaced."""
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
    reshaped: "not torch.float32",
    doubled: "torch.float64",
    renamed: "'secret' is not in the model",
    lacking: "unlike those of the others",
    mistyped: "neither Sum nor Each",
    weighed: "weight that is none",
    added: "unlike those of the others",
    bare: "not a mapping of tensors",
}


def spoiled(tmp_path, spoil):
    engine, link = here(CONFIG, tmp_path)
    link.spoil = lambda node, order, reply: spoil(reply) if node == 2 else reply
    return run(CONFIG, out=tmp_path / "run", engine=engine).values


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_wrong_form_is_left_out_by_name(change, tmp_path, caplog):
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
def test_garbage_is_left_out(garbage, tmp_path):
    values = spoiled(tmp_path, lambda reply: garbage)
    assert [failure["client"] for failure in values["failures"]] == [2]
    assert values["client_updates"] == 3


def test_the_model_is_that_of_the_clients_that_were_left(tmp_path):
    honest = {**CONFIG, "engine": {"kind": "serial"}}
    values = spoiled(tmp_path, lambda reply: b"garbage")
    assert values["model_sha256"] != run(honest).values["model_sha256"]
    assert np.isfinite(values["metrics"]["task_agnostic"]["ACC"])


def test_who_does_not_answer_is_missing_and_the_reason_is_kept(tmp_path):
    values = spoiled(tmp_path, lambda reply: FailedUpload(2, "no answer within 600 s"))
    assert values["missing_reports"] == 1
    assert values["failures"][0]["reason"] == "no answer within 600 s"


def test_without_any_answer_the_run_stops_and_can_go_on(tmp_path):
    engine, link = here(CONFIG, tmp_path)
    link.spoil = lambda node, order, reply: FailedUpload(node, "gone")
    with pytest.raises(RunError, match="no client sent a valid upload"):
        run(CONFIG, out=tmp_path / "run", engine=engine)
    link.spoil = lambda node, order, reply: reply
    assert run(CONFIG, out=tmp_path / "run", resume=True, engine=engine).values["rounds"] == 1


def test_a_node_refuses_clients_that_are_not_its_own(tmp_path):
    _, link = here(CONFIG, tmp_path)
    with pytest.raises(BadMessage, match="client 1 is not at node 0"):
        link.node(0).serve(NodeRequest("train", RoundPosition(0), (1,)), pack({}))
    with pytest.raises(BadMessage, match="client -4 is not at node 0"):
        link.node(0).serve(NodeRequest("train", RoundPosition(0), (-4,)), pack({}))
    with pytest.raises(BadMessage, match="task 2 is not of this run"):
        link.node(0).serve(NodeRequest("train", RoundPosition(1), (0,)), pack({}))


def orders(tmp_path, method=None):
    """A node, and the train order that it serves with its body."""
    engine, link = here({**CONFIG, "method": {"kind": method or "fedavg"}}, tmp_path)
    seen = []
    exchange = link.send_and_receive

    def remember(heads, body, limit):
        seen.append((read_head(heads[0]), body))
        return exchange(heads, body, limit)

    link.send_and_receive = remember
    run(link.config, engine=engine)
    return link.node(0), seen


SPOTS = {
    "task": [-1, 1, 0.0, True, "0", None, 10**9],
    "round": [-1, 1, 2, 0.5],
    "rounds": [0, 2, -1, 10**7],
    "lr": [-0.1, float("nan"), float("inf"), "0.1", None, True],
    "clients": [-1, 5, 2.0],
    "attempt": [-1, "1"],
    "exchange": [1, -1, 10**6, "0"],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in SPOTS.items() for value in values]
)
def test_a_node_refuses_a_spot_where_the_run_never_is(name, value, tmp_path):
    node, ((order, body), *_) = orders(tmp_path)
    node.serve(order, body)
    assert order.kind == "train"
    with pytest.raises(BadMessage):
        node.serve(replace(order, spot=replace(order.spot, **{name: value})), body)


def test_a_node_serves_the_exchanges_that_the_method_declares_and_no_others(tmp_path):
    node, seen = orders(tmp_path, "fot")
    (order, body) = seen[-1]
    assert (order.kind, order.spot.exchange, order.spot.round) == ("exchange", 1, 1)
    node.serve(order, body)
    for change in ({"exchange": 2}, {"exchange": 0}, {"exchange": -1, "round": 0}, {"round": 0}):
        with pytest.raises(BadMessage, match="is no part of task 1"):
            node.serve(replace(order, spot=replace(order.spot, **change)), body)


@pytest.mark.parametrize("part", ["params", "buffers", "broadcast"])
def test_a_node_refuses_a_body_without_a_part(part, tmp_path):
    node, ((order, body), *_) = orders(tmp_path)
    rest = {name: value for name, value in unpack(body).items() if name != part}
    with pytest.raises(BadMessage, match=f"an order without {part}"):
        node.serve(order, pack(rest))


def test_a_form_of_another_exchange_does_not_shut_out_the_others(tmp_path):
    """Two exchanges of one task have forms of their own: a replayed one is unlike the others."""
    config = {**CONFIG, "method": {"kind": f"{__name__}.TwoForms"}}
    engine, link = here(config, tmp_path)
    first = {}

    def replay(node, order, reply):
        if node == 2 and order.kind == "exchange":
            return first.setdefault("reply", reply)
        return reply

    link.spoil = replay
    values = run(config, engine=engine).values
    (failure,) = values["failures"]
    assert failure["client"] == 2
    assert "unlike those of the others" in failure["reason"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "delete", "spot": {}}', "\x00"])
def test_orders_that_cannot_be_read(text):
    with pytest.raises(BadMessage):
        read_head(text)


def test_the_form_of_earlier_rounds_counts_more_than_a_majority() -> None:
    honest, other = ({"update": Sum({"w": torch.zeros(n)})} for n in (2, 3))
    engine = FlowerEngine(3, None)
    assert engine._alike({0: honest, 1: honest, 2: honest}) == dict.fromkeys(range(3), honest)
    after = engine._alike({0: honest, 1: other, 2: other})
    assert after[0] is honest
    assert all(isinstance(after[client], FailedUpload) for client in (1, 2))


def test_an_order_says_how_many_clients_take_part(tmp_path: Path) -> None:
    """Nodes size their part of the noise by it."""
    values = {**CONFIG, "clients": {"count": 3, "per_round": 2}}
    engine, link = here(values, tmp_path)
    orders: list[NodeRequest] = []

    def note(node: int, order: NodeRequest, reply: bytes) -> bytes:
        orders.append(order)
        return reply

    link.spoil = note
    run(values, engine=engine)
    assert {order.sampled for order in orders if order.kind == "train"} == {2}
