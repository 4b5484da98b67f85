"""A server that does not follow the protocol learns from how, and how often, a node replies.

declines      a secure sum that a client declines, since its values are too large
at once       two sums of one round at the same moment
dropouts      a sum from which clients dropped out until it is smaller than the owner allows
repetitions   an order of long ago, and almost the same order many times, for new noise
refusals      a model that lets the node's work fail, to read labels or files in the sentence
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from in_process import RUN, InProcessTransport
from test_lying_server import CONFIG, DATA, LOCAL, NOISY, SECURE, changed_sum, recorded, released

from perdure.config import dump, parse
from perdure.federation.messages import (
    BadMessage,
    NodeRequest,
    RoundPosition,
    pack,
    to_bytes,
    unpack,
)
from perdure.federation.node.policy import NodePolicy
from perdure.federation.node.run import ReleaseLog
from perdure.federation.node.uploads import SecAggClientStore
from perdure.federation.node.worker import make_node
from perdure.privacy.secagg.messages import Declined, DropoutRequest, SumRequest, decode, encode
from perdure.training.settings import with_method_defaults

KEYS, ANNOUNCE = (NodeRequest(kind, RoundPosition(0)) for kind in ("public_keys", "announce"))
SCORE = NodeRequest("evaluate", RoundPosition(0), (0,), (0,))

# ---- secure sums


def fresh(tmp_path):
    """Return nodes that have served nothing, and an order to node 0 for a sum with their keys."""
    transport, keys = recorded(tmp_path, **SECURE), {}
    nodes = InProcessTransport(transport.config, tmp_path / "fresh")
    for n in range(4):
        reply = unpack(nodes.node(n).serve(KEYS.for_clients([n]), pack({})))
        keys[n] = to_bytes(reply["public_keys"][str(n)])
    header, body, _ = transport.requests("train")[0]
    return nodes, header, changed_sum(body, lambda r: replace(r, public_keys=keys))


def scaled(body, factor):
    """Return an order with a model whose weights are multiplied."""
    tree = unpack(body)
    params = {name: factor * tensor for name, tensor in tree["params"].items()}
    return pack({**tree, "params": params})


def renamed(body):
    """Return an order for another sum with the same clients."""
    return changed_sum(body, lambda r: replace(r, session=replace(r.session, nonce="other")))


def test_a_client_that_declines_tells_no_value_and_takes_part_in_no_other_sum(tmp_path):
    """It once told its largest weighted value, as often as a server asked."""
    nodes, header, body = fresh(tmp_path)
    reply = unpack(nodes.node(0).serve(header, scaled(body, 1e12)))
    reason = decode(to_bytes(reply["masked"]["0"]), Declined).reason
    assert reason == (
        "a weighted value is above the limit 2.15e+09 of privacy.bits and privacy.precision"
    )
    nodes.nodes.clear()
    with pytest.raises(BadMessage, match="took part in another sum of task 1, round 1"):
        nodes.node(0).serve(header, renamed(body))


def test_of_two_sums_at_the_same_moment_one_is_refused(tmp_path, monkeypatch):
    """Each is served by its own process, which did not see what the other sent."""
    nodes, header, body = fresh(tmp_path)
    both, upload = threading.Barrier(2), SecAggClientStore.upload

    def slow(store, *args):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(2)  # until the other is here, too, unless it has to wait for the end of this
        return upload(store, *args)

    monkeypatch.setattr(SecAggClientStore, "upload", slow)
    settings = {"number": 0, "state": str(nodes.folder / "node-0" / "state")}
    outcomes = []

    def ask(order):
        node = make_node({"run": RUN, "config": dump(nodes.config)}, settings, nodes.policy)
        try:
            outcomes.append(node.serve(header, order))
        except BadMessage as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=ask, args=[order]) for order in (body, renamed(body))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (reason,) = [outcome for outcome in outcomes if isinstance(outcome, str)]
    assert len(outcomes) == 2
    assert "took part in another sum" in reason


def test_a_sum_of_fewer_clients_than_the_owner_allows_is_not_opened(tmp_path):
    """Clients dropped out after their uploads, or the server says so."""
    nodes, header, body = fresh(tmp_path)
    nodes.node(0).serve(header, body)
    digest = decode(bytes.fromhex(unpack(body)["sum_request"]), SumRequest).digest
    asked = encode(DropoutRequest(digest, (0, 1, 2))).hex()
    reveal = NodeRequest("reveal", RoundPosition(0), (0,), requests={"0": asked})
    nodes.policy = NodePolicy(min_clients=4, code="any", files="any")
    nodes.nodes.clear()
    with pytest.raises(BadMessage, match="must be of at least 4 clients, 3 are left"):
        nodes.node(0).serve(reveal, pack({}))
    nodes.policy = NodePolicy(min_clients=3, code="any", files="any")
    nodes.nodes.clear()
    assert unpack(nodes.node(0).serve(reveal, pack({})))["answers"].keys() == {"0"}


# ---- repetitions


def test_an_order_of_an_old_round_gets_no_new_noise(tmp_path):
    """The node has deleted its reply, but not that it was sent."""
    transport = recorded(tmp_path, **{**NOISY, "train": {"rounds": 18, "max_steps": 1}})
    header, body, _ = transport.requests("train")[0]
    for _ in range(2):
        transport.nodes.clear()
        with pytest.raises(BadMessage, match="the run is past this request"):
            transport.node(0).serve(header, body)
    other = transport.node(0).serve(header, scaled(body, 0.5))
    assert unpack(other)["releases"] == {"0": 2}


def test_one_place_of_a_run_is_served_ten_times_at_most(tmp_path):
    """The mean of 10,000 replies to almost the same order would have no noise."""
    transport = recorded(tmp_path, **NOISY)
    header, body, reply = transport.requests("train")[0]
    for k in range(1, 10):
        order = scaled(body, 1 + k / 1000)
        assert unpack(transport.node(0).serve(header, order))["releases"] == {"0": k + 1}
    transport.nodes.clear()
    with pytest.raises(BadMessage, match="10 other replies to train 0 at round 0 of task 1"):
        transport.node(0).serve(header, scaled(body, 2.0))
    again, first = unpack(transport.node(0).serve(header, body)), unpack(reply)
    assert again.pop("releases") == {"0": 10}
    assert pack(again) == pack(first)


# ---- losses, and what the log says


def test_a_loss_is_a_field_that_the_owner_may_keep(tmp_path):
    transport = recorded(tmp_path)
    header, body, reply = transport.requests("train")[0]
    assert released(tmp_path)[0]["loss"] == unpack(reply)["losses"]["0"]
    transport.policy = transport.policy.model_copy(update={"fields": ("update",)})
    transport.nodes.clear()
    assert "losses" not in unpack(transport.node(0).serve(header, body))
    assert "loss" not in released(tmp_path)[-1]


def test_the_log_says_what_replies_without_uploads_told(tmp_path):
    nodes = recorded(tmp_path, **SECURE)
    nodes.node(0).serve(ANNOUNCE.for_clients([0]), pack({}))
    _, body, _ = nodes.requests("train")[0]
    nodes.node(0).serve(SCORE, pack({**unpack(body), "state": {}}))
    log = {entry["kind"]: entry for entry in released(tmp_path)}
    assert log["public_keys"]["clients"] == [0]
    assert log["announce"]["rows"] == 30
    assert (log["evaluate"]["tests"], log["evaluate"]["tests_on"]) == ([0], "test")


def test_a_line_that_was_cut_by_a_kill_costs_no_other(tmp_path):
    log = ReleaseLog(tmp_path / "released.jsonl")
    log.add([{"kind": "public_keys"}])
    text = log.path.read_text()
    log.path.write_text(text + text[:20])
    log.add([{"kind": "train"}, {"kind": "end"}])
    assert [entry["kind"] for entry in log.entries()] == ["public_keys", "train", "end"]
    assert json.loads(log.path.read_text().splitlines()[-1])["kind"] == "end"


# ---- what refusals say


def test_a_refusal_says_nothing_about_labels(tmp_path, caplog):
    """Without the outputs of classes 3 to 9, an error of torch names a label of the node."""
    transport = recorded(tmp_path)
    header, body, _ = transport.requests("train")[0]
    tree = unpack(body)
    for name in ("head.weight", "head.bias"):
        tree["params"][name] = tree["params"][name][:3]
    with pytest.raises(BadMessage) as refusal:
        transport.node(0).serve(header, pack(tree))
    assert str(refusal.value) == "the request cannot be served; the node's log says why"
    assert "is out of bounds" in caplog.text


def test_a_refusal_names_no_file_of_the_data(tmp_path, caplog):
    """A file became unreadable after its task was announced."""
    x, y = np.zeros((20, 8, 8), np.uint8), np.arange(20) % 10
    np.savez(tmp_path / "jane-doe.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    (tmp_path / "tasks.yaml").write_text("- {source: npz, path: jane-doe.npz}\n")
    config = with_method_defaults(parse({**CONFIG, **DATA, **LOCAL}))
    transport = InProcessTransport(config, tmp_path, {0: tmp_path})
    transport.node(0).serve(ANNOUNCE.for_clients([0]), pack({}))
    (tmp_path / "jane-doe.npz").write_bytes(b"damaged")
    for request in (ANNOUNCE.for_clients([0]), SCORE):
        transport.nodes.clear()
        with pytest.raises(BadMessage) as refusal:
            transport.node(0).serve(request, pack({"params": {}, "buffers": {}, "state": {}}))
        assert str(refusal.value) == "its data of task 1 cannot be used; the node's log says why"
    assert "jane-doe.npz" in caplog.text
