"""A hostile node tries to own the model, or the accuracy, by the numbers that it sends.

Tried, by the node of client 0, which sends the negative of its update:

    weight       1e30, 1e308 or 3 times the rows with the update; announced rows of 10^12 and 10^18
    own weight   of a field that has one in the method (FOT's shares)
    counts       total = correct = 1e300, or 10^12
    secure sums  a weight of 1e6 under the masks; an order that caps one client alone
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from in_process import in_process_engine
from test_own_data import CONFIG as OWN_DATA
from test_own_data import write

from perdure.contract.uploads import FailedUpload
from perdure.core.errors import RunError
from perdure.federation.messages import pack, unpack
from perdure.privacy.secagg import client as secagg_client
from perdure.runs.run import run

NODES = 4
CONFIG = {
    **OWN_DATA,
    "clients": {"count": NODES},
    "stream": {"kind": "split", "tasks": 1},
    "federation": {"classes": OWN_DATA["federation"]["classes"], "shape": [1, 8, 8]},
    "train": {"rounds": 6, "batch_size": 32, "local_epochs": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folders = {}
    for node in range(NODES):
        folders[node] = tmp_path_factory.mktemp(f"data-{node}")
        write(folders[node] / "task-1.npz", range(10), range(node, 800, NODES))
    return folders


def hostile(config, tmp_path, data, spoil):
    """Return the result of a run in which `spoil` changes the trees of node 0's replies."""
    engine, transport = in_process_engine(config, tmp_path, data)

    def change(node, request, reply):
        if node or isinstance(reply, FailedUpload):
            return reply
        tree = unpack(reply)
        spoil(request, tree)
        return pack(tree)

    transport.spoil = change
    return run(config, engine=engine).values


def negative_update(request, tree, **changes):
    if request.kind == "train":
        update = tree["uploads"]["0"]["update"]
        update |= {"value": {name: -value for name, value in update["value"].items()}, **changes}


def accuracy(values):
    return values["metrics"]["task_agnostic"]["ACC"]


@pytest.fixture(scope="module")
def honest(tmp_path_factory, data):
    engine, _ = in_process_engine(CONFIG, tmp_path_factory.mktemp("honest"), data)
    return accuracy(run(CONFIG, engine=engine).values)


@pytest.mark.parametrize("weight", [1e30, 1e308, 3.0 * 150])
def test_a_weight_that_the_node_does_not_have(weight, tmp_path, data, honest, caplog):
    with caplog.at_level(logging.WARNING):
        values = hostile(CONFIG, tmp_path, data, lambda q, t: negative_update(q, t, weight=weight))
    assert {failure["client"] for failure in values["failures"]} == {0}
    assert f"update: weight: must be at most 150, got {weight:g}" in caplog.text
    assert accuracy(values) > honest - 0.05


def test_a_weight_within_the_bound_where_the_others_have_none(tmp_path, data):
    values = hostile(CONFIG, tmp_path, data, lambda q, t: negative_update(q, t, weight=140.0))
    assert {failure["client"] for failure in values["failures"]} == {0}
    assert "differ from those of the other clients" in values["failures"][0]["reason"]


def announced(rows):
    def spoil(request, tree):
        if request.kind == "announce":
            tree["size"] = rows
        negative_update(request, tree)

    return spoil


def weights_of(monkeypatch):
    """Return a dict that collects the clients' weights on the server."""
    from perdure.federation.server.engine import FlowerEngine

    seen, train = {}, FlowerEngine.train

    def watch(self, training, clients, keep):
        seen.update({client.id: client.weight for client in clients})
        return train(self, training, clients, keep)

    monkeypatch.setattr(FlowerEngine, "train", watch)
    return seen


@pytest.mark.parametrize(("rows", "share"), [(10**12, 0.5), (10**12, 0.25), (1000, 0.3)])
def test_announced_rows_count_up_to_a_share(rows, share, tmp_path, data, monkeypatch):
    seen = weights_of(monkeypatch)
    config = {**CONFIG, "federation": {**CONFIG["federation"], "max_node_share": share}}
    hostile(config, tmp_path, data, announced(rows))
    assert seen[0] / sum(seen.values()) == pytest.approx(share)
    assert seen[1] == seen[2] == 150


@pytest.mark.parametrize("rows", [10**18, 10**400, -1, 1.5])
def test_announced_rows_that_no_node_has_are_refused(rows, tmp_path, data, monkeypatch):
    """The run stops before anybody trains."""
    seen = weights_of(monkeypatch)
    patient = {**CONFIG, "federation": {**CONFIG["federation"], "wait": 0}}
    with pytest.raises(RunError, match="size: must be 0 to 1099511627776 examples"):
        hostile(patient, tmp_path / "a", data, announced(rows))
    assert not seen


def test_by_default_no_node_outweighs_all_others(tmp_path, data, monkeypatch):
    seen = weights_of(monkeypatch)
    hostile(CONFIG, tmp_path, data, announced(10**12))
    assert seen[0] == seen[1] + seen[2] + seen[3]


def test_a_round_of_two_of_four_nodes_is_capped_too(tmp_path, data, monkeypatch):
    seen = weights_of(monkeypatch)
    config = {**CONFIG, "clients": {"count": NODES, "per_round": 2}}
    hostile(config, tmp_path, data, announced(10**12))
    assert seen == dict.fromkeys(range(NODES), 150.0)


def test_equal_nodes_are_not_capped(tmp_path, data, monkeypatch):
    seen = weights_of(monkeypatch)
    engine, _ = in_process_engine(CONFIG, tmp_path, data)
    run(CONFIG, engine=engine)
    assert set(seen.values()) == {150.0}


@pytest.mark.parametrize(("weight", "refused"), [(1e30, True), (300.0, True), (150.0, False)])
def test_the_own_weight_of_a_field(weight, refused, tmp_path, data):
    """FOT's shares have the number of rows as their weight."""

    def spoil(request, tree):
        if request.kind == "exchange":
            tree["uploads"]["0"]["shares"]["weight"] = weight

    config = {**CONFIG, "method": {"kind": "fot"}, "train": {"rounds": 1, "max_steps": 1}}
    values = hostile(config, tmp_path, data, spoil)
    sentence = f"shares: weight: must be at most 150, got {weight:g}"
    assert [failure["reason"] for failure in values["failures"]] == [sentence] * refused


def own_counts(total):
    def spoil(request, tree):
        if request.kind == "evaluate":
            (counts,) = tree["counts"]
            counts |= {"total": total, "correct": dict.fromkeys(counts["correct"], total)}

    return spoil


def test_counts_of_a_node_that_says_everything_is_right(tmp_path, data, honest, caplog):
    with caplog.at_level(logging.WARNING):
        huge = hostile(CONFIG, tmp_path / "a", data, own_counts(1e300))
        large = hostile(CONFIG, tmp_path / "b", data, own_counts(1e12))
    assert "evaluation counts of a node are left out" in caplog.text
    assert accuracy(huge) == pytest.approx(honest, abs=0.05)
    assert "0" not in huge["client_tests"][0]
    assert "its 1e+12 test examples count as" in caplog.text
    others = [large["client_tests"][0][str(node)] for node in range(1, NODES)]
    rest = sum(o["examples"] * o["accuracy"]["task_agnostic"] for o in others)
    rest /= sum(other["examples"] for other in others)
    assert accuracy(large) == pytest.approx(0.5 + 0.5 * rest)
    assert large["client_tests"][0]["0"] == {
        "examples": 1e12, "accuracy": {"task_agnostic": 1.0, "task_aware": 1.0, "routed": None},
    }  # fmt: skip


def test_counts_of_one_of_two_nodes_that_are_left_of_four(tmp_path, data):
    engine, transport = in_process_engine(CONFIG, tmp_path, data)

    def change(node, request, reply):
        if request.kind != "evaluate" or isinstance(reply, FailedUpload):
            return reply
        if node > 1:
            return FailedUpload(node, "gone")
        tree = unpack(reply)
        own_counts(10**12)(request, tree) if node == 0 else None
        return pack(tree)

    transport.spoil = change
    values = run(CONFIG, engine=engine).values
    other = values["client_tests"][0]["1"]["accuracy"]["task_agnostic"]
    assert accuracy(values) == pytest.approx(0.5 + 0.5 * other)


SECURE = {
    **CONFIG,
    "federation": {**CONFIG["federation"], "wait": 0},
    "privacy": {"secagg": True},
    "train": {"rounds": 1, "max_steps": 1},
}


def test_a_weight_under_masks_is_seen_in_the_sum(tmp_path, data, monkeypatch):
    row_of, rows = secagg_client.row_of, []

    def heavy_first(fields, weight):
        rows.append(row_of(fields, weight if rows else 1e6))
        return rows[-1]

    monkeypatch.setattr(secagg_client, "row_of", heavy_first)
    engine, _ = in_process_engine(SECURE, tmp_path, data)
    sentence = "the secure sum is rejected.*update: total weight: must be 0 to 600, got 1.00045e.06"
    with pytest.raises(RunError, match=sentence):
        run(SECURE, engine=engine)


def test_nodes_cap_their_own_weight_in_secure_sums(tmp_path, data, monkeypatch):
    """Announced honestly: the node with nearly all rows uploads with half of the weight."""
    sent, row_of = [], secagg_client.row_of

    def watch(fields, weight):
        sent.append(weight)
        return row_of(fields, weight)

    monkeypatch.setattr(secagg_client, "row_of", watch)
    few = {}
    for node in range(1, NODES):
        few[node] = tmp_path / f"few-{node}"
        write(few[node] / "task-1.npz", range(10), range(node, 90, NODES))
    engine, _ = in_process_engine(SECURE, tmp_path, {0: data[0], **few})
    run(SECURE, engine=engine)
    assert sent[0] == pytest.approx(sum(sent[1:]))
    assert sent[0] < 60


def test_a_cap_for_one_client_alone_opens_no_sum(tmp_path, data, caplog):
    """A server that leaves all other clients no weight cannot read one client's update.

    The cap is a part of the request that masks derive from: rows of two requests do not cancel.
    """
    from perdure.privacy.secagg.messages import SumRequest, decode, encode

    engine, transport = in_process_engine(SECURE, tmp_path, data)
    exchange = transport.send_and_receive

    def single_out(headers, body, limit):
        tree = unpack(body)
        if "sum_request" not in tree:
            return exchange(headers, body, limit)
        honest = bytes.fromhex(tree["sum_request"])
        lying = encode(replace(decode(honest, SumRequest), weight_cap=1.0))
        replies = {}
        for node, header in headers.items():
            call = honest if node == 0 else lying
            replies |= exchange({node: header}, pack(tree | {"sum_request": call.hex()}), limit)
        return replies

    transport.send_and_receive = single_out
    with pytest.raises(RunError, match="1 of 4 clients are left"):
        run(SECURE, engine=engine)
    assert caplog.text.count("the message belongs to another sum") >= 3


@pytest.mark.parametrize("cap", [-1.0, 0.0, float("nan"), float("inf"), "1", True])
def test_impossible_caps_are_refused(cap):
    from perdure.privacy.secagg.layout import FixedPoint
    from perdure.privacy.secagg.messages import (
        MalformedMessage,
        Session,
        SumRequest,
        decode,
        encode,
    )

    request = SumRequest(Session(0, 0), {}, 3, FixedPoint(64, 30, 3), weight_cap=cap)
    with pytest.raises(MalformedMessage):
        decode(encode(request), SumRequest)
