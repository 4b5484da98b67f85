"""A federation below its quorum waits for missing nodes, then stops resumably and names them."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from in_process import in_process_engine
from own_data import CONFIG, with_federation, write_nodes

from perdure.config import parse
from perdure.contract.uploads import FailedUpload
from perdure.core.errors import RunError, UserError
from perdure.federation.messages import pack, unpack
from perdure.federation.server import replies as waiting
from perdure.runs.run import run
from perdure.training.experiment import build_experiment

TWO_TASKS = {**CONFIG, "stream": {"kind": "split", "tasks": 2}}
TWO_TASKS["federation"] = {**CONFIG["federation"], "tasks": CONFIG["federation"]["tasks"][:2]}
AT_ONCE = with_federation(TWO_TASKS, wait=0)
"""A run that does not wait for missing nodes."""


@pytest.fixture
def data(tmp_path):
    return write_nodes(tmp_path / "data")


@pytest.fixture
def pauses(monkeypatch):
    """Return the pauses that were asked for; the clock advances by them and nothing sleeps."""
    asked = []
    monkeypatch.setattr(waiting.time, "sleep", asked.append)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: float(sum(asked)))
    return asked


def gone(*nodes, kind, task=1, times=10**9):
    """Return a function by which nodes do not reply to some requests, so many times each."""
    left = dict.fromkeys(nodes, times)

    def spoil(node, request, reply):
        if (request.kind, request.position.task) != (kind, task) or not left.get(node):
            return reply
        left[node] -= 1
        return FailedUpload(node, f"node-{node}: the line is cut")

    return spoil


def run_with(config, tmp_path, data, spoil=None, resume=False):
    engine, transport = in_process_engine(config, tmp_path / "nodes", data)
    if spoil is not None:
        transport.spoil = spoil
    return run(config, out=tmp_path / "run", resume=resume, engine=engine).values, transport


def undisturbed(config, tmp_path, data):
    engine, _ = in_process_engine(config, tmp_path / "alone", data)
    return run(config, engine=engine).values


def stops_and_resumes(config, tmp_path, data, spoil, sentence):
    """Check that a run stops with a sentence, and that it is resumed as if nothing happened."""
    with pytest.raises(RunError, match=sentence):
        run_with(config, tmp_path, data, spoil)
    values, _ = run_with(config, tmp_path, data, resume=True)
    wanted = undisturbed(config, tmp_path, data)
    for key in ("model_sha256", "matrix", "participation", "failures"):
        assert values[key] == wanted[key]


# ---- the start of a task


def test_a_refused_start_of_a_task_is_not_a_node_without_data(tmp_path, data):
    stops_and_resumes(
        AT_ONCE, tmp_path, data, gone(1, kind="announce"),
        r"start of task 2: nodes are missing \(node-1: the line is cut\)",
    )  # fmt: skip


def test_a_node_that_refuses_its_data_is_named_on_the_server_without_its_files(
    tmp_path, data, caplog
):
    (data[2] / "task-2.npz").write_bytes(b"damaged")
    with pytest.raises(RunError) as error:
        run_with(AT_ONCE, tmp_path, data)
    assert "node-2: its data of task 2 cannot be used" in str(error.value)
    assert str(data[2]) not in str(error.value)
    assert any(str(data[2]) in r.message for r in caplog.records if r.levelno == logging.ERROR)


@pytest.mark.parametrize("size", [-1, True, "9", None, 10**400])
def test_an_impossible_size_is_a_failure(size, tmp_path, data):
    def spoil(node, request, reply):
        is_meant = node == 0 and request.kind == "announce"
        return pack({"size": size}) if is_meant else reply

    with pytest.raises(RunError, match="node-0: size: must be 0 to"):
        run_with(AT_ONCE, tmp_path, data, spoil)


def test_a_task_of_which_no_node_has_data_stops_the_run(tmp_path, data):
    held = [folder / "task-2.npz" for folder in data.values()]
    for path in held:
        path.rename(path.with_suffix(".later"))
    with pytest.raises(RunError, match="node-0: it holds no examples of task 2"):
        run_with(AT_ONCE, tmp_path, data)
    for path in held:
        path.with_suffix(".later").rename(path)
    values, _ = run_with(AT_ONCE, tmp_path, data, resume=True)
    assert values["rounds"] == 4


def test_the_start_of_a_task_waits_for_all_nodes(tmp_path, data, pauses):
    spoil = gone(0, 1, kind="announce", times=3)
    values, transport = run_with(TWO_TASKS, tmp_path, data, spoil)
    assert pauses == [5.0, 10.0, 20.0]
    assert values["model_sha256"] == undisturbed(TWO_TASKS, tmp_path, data)["model_sha256"]
    assert values["failures"] == []
    announced = [node for node, kind, task in transport.log if (kind, task) == ("announce", 1)]
    assert announced == [0, 1, 2, 0, 1, 0, 1, 0, 1]


def test_waiting_ends(tmp_path, data, pauses):
    with pytest.raises(RunError, match="start of task 2: nodes are missing"):
        run_with(with_federation(TWO_TASKS, wait=100), tmp_path, data, gone(1, kind="announce"))
    assert sum(pauses) == 100


def test_a_spared_node_is_asked_again_before_every_round(tmp_path, data):
    config = with_federation(AT_ONCE, quorum=2)
    values, transport = run_with(config, tmp_path, data, gone(1, kind="announce", times=1))
    # it misses the first round, is asked again and trains in the second
    failures = [(each["round"], each["client"]) for each in values["failures"]]
    assert failures == [(0, 1)]
    assert transport.log.count((1, "train", 1)) == 1
    assert values["participation"]["1"] == {"sampled": 3, "counted": 3, "failed": 1}
    assert values["participation"]["0"] == {"sampled": 4, "counted": 4, "failed": 0}


# ---- rounds, exchanges and evaluations


def test_a_round_below_the_quorum_stops_and_resumes(tmp_path, data):
    config = with_federation(AT_ONCE, quorum=3)
    stops_and_resumes(
        config, tmp_path, data, gone(2, kind="train"),
        r"task 2 round 1: nodes are missing \(node-2: the line is cut\)",
    )  # fmt: skip


def test_a_round_below_the_quorum_waits_for_missing_nodes(tmp_path, data, pauses):
    config = with_federation(TWO_TASKS, quorum=3)
    values, transport = run_with(config, tmp_path, data, gone(2, kind="train", times=2))
    wanted = undisturbed(config, tmp_path, data)
    assert pauses == [5.0, 10.0]
    for key in ("model_sha256", "matrix", "failures", "participation"):
        assert values[key] == wanted[key]
    trained = [node for node, kind, task in transport.log if (kind, task) == ("train", 1)]
    assert trained == [0, 1, 2, 2, 2, 0, 1, 2]


def test_named_nodes_are_needed_and_others_are_not(tmp_path, data):
    config = with_federation(AT_ONCE, quorum=["node-0", "node-2"])
    values, _ = run_with(config, tmp_path, data, gone(1, kind="train"))
    assert values["participation"]["1"] == {"sampled": 4, "counted": 2, "failed": 2}
    with pytest.raises(RunError, match="node-2: the line is cut"):
        run_with(config, tmp_path / "again", data, gone(1, 2, kind="train"))


def test_without_a_quorum_one_node_is_enough_and_none_stops_the_run(tmp_path, data):
    values, _ = run_with(AT_ONCE, tmp_path, data, gone(0, 1, kind="train"))
    counted = [values["participation"][client]["counted"] for client in "012"]
    assert counted == [2, 2, 4]
    with pytest.raises(RunError, match=r"no client sent a valid upload \(client 0"):
        run_with(AT_ONCE, tmp_path / "again", data, gone(0, 1, 2, kind="train"))


def test_an_update_that_is_not_finite_does_not_count_for_the_quorum(tmp_path, data):
    def spoil(node, request, reply):
        if node != 0 or request.kind != "train":
            return reply
        tree = unpack(reply)
        (upload,) = tree["uploads"].values()
        value = upload["update"]["value"]
        name = next(iter(value))
        value[name] = torch.full_like(value[name], float("nan"))
        return pack(tree)

    with pytest.raises(RunError, match="node-0: its update is not finite"):
        run_with(with_federation(AT_ONCE, quorum=3), tmp_path, data, spoil)
    values, _ = run_with(with_federation(AT_ONCE, quorum=2), tmp_path / "two", data, spoil)
    assert values["participation"]["0"]["failed"] == 4


@pytest.mark.parametrize(("kind", "where"), [("exchange", "task 1 round 3"), ("evaluate", "after")])
def test_exchanges_and_evaluations_have_the_quorum_too(kind, where, tmp_path, data):
    config = {**with_federation(AT_ONCE, quorum=3), "method": {"kind": "ewc"}}
    with pytest.raises(RunError, match=rf"{where}.*node-1: the line is cut"):
        run_with(config, tmp_path, data, gone(1, kind=kind, task=0))


def test_rounds_say_who_took_part(tmp_path, data):
    run_with(AT_ONCE, tmp_path, data, gone(1, kind="train"))
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    rounds = [event["participants"] for event in events if event["event"] == "round"]
    assert rounds == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2]]


# ---- the config


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"quorum": 4}, "federation.quorum: must be at most 3"),
        ({"quorum": 0}, "federation.quorum: must be"),
        ({"quorum": []}, "federation.quorum: must be"),
        ({"quorum": ["node-3"]}, "federation.quorum: must be .* node-2"),
        ({"quorum": ["clinic"]}, "federation.quorum.0: must be"),
        ({"wait": -1}, "federation.wait: must be"),
    ],
)
def test_a_quorum_that_no_round_reaches_is_refused(keys, sentence):
    with pytest.raises(UserError, match=sentence):
        build_experiment(parse(with_federation(CONFIG, **keys)))
