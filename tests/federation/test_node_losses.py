"""Training losses that nodes report: recorded as in a simulation, checked, and never required."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from in_process import in_process_engine
from test_own_data import CONFIG as OWN_DATA
from test_own_data import data

from perdure.contract.uploads import FailedUpload
from perdure.federation.messages import pack, unpack
from perdure.federation.server.replies import read_loss, read_size
from perdure.runs.run import run

__all__ = ["data"]
CONFIG = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 2, "batch_size": 16},
    "data": {"limit": 160},
    "engine": {"kind": "flower"},
    "device": "cpu",
}


def losses_of(folder):
    """Return the loss of every round, None where none was recorded."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event.get("loss") for event in events if event["event"] == "round"]


def recorded(config, tmp_path, change=None, data=None):
    """Run a federation whose node 2 changes the losses of its replies; return losses and result."""
    engine, transport = in_process_engine(config, tmp_path, data)
    replies = []

    def spoil(node, request, reply):
        if request.kind != "train":
            return reply
        tree = unpack(reply)
        replies.append(tree)
        if change is not None and node == 2:
            change(tree)
        return pack(tree)

    transport.spoil = spoil
    values = run(config, out=tmp_path / "run", engine=engine).values
    return losses_of(tmp_path / "run"), values, replies


def serial_losses(config, tmp_path):
    run({**config, "engine": {"kind": "serial"}}, out=tmp_path / "serial")
    return losses_of(tmp_path / "serial")


@pytest.mark.parametrize("nodes", [None, 2])
def test_the_loss_is_exactly_that_of_a_simulation(nodes, tmp_path):
    config = {**CONFIG, "engine": {"kind": "flower", "nodes": nodes}}
    found, *_ = recorded(config, tmp_path)
    assert found == serial_losses(CONFIG, tmp_path)
    assert None not in found


def test_the_loss_of_data_that_only_nodes_hold_is_weighted_by_their_sizes(tmp_path, data):
    found, _, replies = recorded(OWN_DATA, tmp_path, data=data)
    engine, _ = in_process_engine(OWN_DATA, tmp_path / "again", data)
    sizes = engine.sizes(0)
    first = {int(c): loss for reply in replies[:2] for c, loss in reply["losses"].items()}
    mean = sum(int(sizes[c]) * loss for c, loss in first.items()) / int(sizes.sum())
    assert len(first) == 2
    assert found[0] == pytest.approx(mean, rel=1e-12)


def test_a_node_of_an_earlier_release_does_not_report_it(tmp_path):
    """The mean is then that of the others, and all uploads count."""
    found, values, replies = recorded(CONFIG, tmp_path, lambda tree: tree.pop("losses"))
    assert values["failures"] == []
    assert values["client_updates"] == 16
    assert all(loss is not None for loss in found)
    assert sum("losses" in reply for reply in replies) == 12


def test_no_node_reports_it(tmp_path):
    engine, transport = in_process_engine(CONFIG, tmp_path)

    def without(node, request, reply):
        tree = unpack(reply)
        tree.pop("losses", None)
        return pack(tree)

    transport.spoil = without
    values = run(CONFIG, out=tmp_path / "run", engine=engine).values
    assert losses_of(tmp_path / "run") == [None] * 4
    assert values["failures"] == []


BAD = [
    float("nan"), float("inf"), -float("inf"), 1e10, -1e10, 10**400, -(10**400), True, "0.5", [],
    {"0": 1.0}, torch.tensor(0.5),
]  # fmt: skip


@pytest.mark.parametrize("value", BAD, ids=lambda value: str(value)[:9])
def test_a_loss_that_cannot_be_is_left_out_and_said(value, caplog):
    reply = unpack(pack({"uploads": {}, "losses": {"2": value, "6": 0.25}}))
    assert read_loss(reply, 2) is None
    assert "client 2: training loss: must be a number" in caplog.text
    assert len(caplog.text) < 300  # whatever was sent
    assert read_loss(reply, 6) == 0.25
    assert read_loss(reply, 3) is None


@pytest.mark.parametrize("value", [[0.5], 0.5, "0.5", 10**400, torch.tensor(0.5)])
def test_losses_that_are_no_mapping_are_left_out(value):
    assert read_loss(unpack(pack({"losses": value})), 0) is None


def test_a_false_loss_changes_nothing_but_the_record(tmp_path, caplog):
    def huge(tree):
        tree["losses"] = dict.fromkeys(tree["losses"], 10**400)

    with caplog.at_level(logging.WARNING):
        found, values, _ = recorded(CONFIG, tmp_path, huge)
    honest, *_ = recorded(CONFIG, tmp_path / "honest")
    assert values["failures"] == []
    assert (
        values["model_sha256"]
        == run({**CONFIG, "engine": {"kind": "serial"}}).values["model_sha256"]
    )
    assert all(loss is not None and 0 < loss < 10 for loss in found)
    assert found != honest
    assert "client 2: training loss" in caplog.text


def test_a_node_cannot_speak_for_clients_of_others(tmp_path):
    def more(tree):
        tree["losses"] |= {"0": 1e6, "1": 1e6, "-1": 1e6, "99": 1e6}

    found, *_ = recorded(CONFIG, tmp_path, more)
    assert found == serial_losses(CONFIG, tmp_path)


def test_the_loss_of_an_upload_that_is_left_out_is_left_out(tmp_path):
    def renamed(tree):
        tree["losses"] = dict.fromkeys(tree["losses"], 1e6)
        for upload in tree["uploads"].values():
            upload["update"]["value"] = {"other": torch.zeros(1)}

    found, values, _ = recorded(CONFIG, tmp_path, renamed)
    assert {failure["client"] for failure in values["failures"]} == {2}
    assert max(found) < 10


@pytest.mark.parametrize(
    "privacy", [{"secagg": True}, {"clip": 1.0, "noise": 0.5}, {"secagg": True, "clip": 1.0}]
)
def test_masked_and_noisy_uploads_go_without_it(privacy, tmp_path):
    config = {**CONFIG, "train": {**CONFIG["train"], "weighting": "uniform"}, "privacy": privacy}

    def smuggled(tree):
        tree["losses"] = {"2": 0.5}

    found, values, replies = recorded(config, tmp_path, smuggled)
    assert sum("losses" in reply for reply in replies) == 4  # what node 2 was made to add
    assert found == [None] * 4
    assert values["failures"] == []


@pytest.mark.parametrize("size", [-1, True, 1.0, "9", None, 10**400, 1 << 50])
def test_a_size_that_no_node_has_is_a_failure(size):
    failure = read_size(1, {"size": size})
    assert isinstance(failure, FailedUpload)
    assert failure.client == 1
    assert "size: must be 0 to" in failure.reason
