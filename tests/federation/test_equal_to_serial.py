"""A run over messages and nodes ends with the weights of the serial engine."""

from __future__ import annotations

import json

import pytest
from in_process import in_process_engine, no_secrets
from safetensors.torch import load_file

from backbone_files import write_vit
from perdure.data.feature_cache import FileCacheStorage
from perdure.runs.run import run

BASE = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"rounds": 2, "batch_size": 64},
    "data": {"limit": 240},
    "device": "cpu",
}
METHODS = ["fedavg", "fot", "fedprotip", "special", "stamp", "gpm", "ewc", "er", "flwf-2t"]


@pytest.mark.parametrize("kind", METHODS)
def test_same_weights_and_matrices_as_serial(kind, tmp_path):
    compare({**BASE, "method": {"kind": kind}}, tmp_path)


def test_an_exchange_that_waits_for_the_next_task_equals_serial(tmp_path):
    """FOT's GPSE, with data of the task before; so many clients that not all hold each task."""
    stream = {"kind": "permuted", "tasks": 3, "presence": 0.5}
    config = {**BASE, "stream": stream, "clients": {"count": 5}}
    compare({**config, "method": {"kind": "fot", "closing": False}}, tmp_path)


def test_references_of_absent_clients_equal_serial(tmp_path):
    stream = {"kind": "permuted", "tasks": 3, "presence": 0.5}
    config = {**BASE, "stream": stream, "clients": {"count": 5}}
    compare({**config, "method": {"kind": "fedprotip"}}, tmp_path)


def test_every_kind_of_exchange_equals_serial(tmp_path):
    """Before training and at the task's end, with client states, also of earlier clients."""
    stream = {"kind": "permuted", "tasks": 3, "presence": 0.5}
    config = {**BASE, "stream": stream, "clients": {"count": 5}}
    compare({**config, "method": {"kind": "phased.Phased"}}, tmp_path)
    found = {}
    for name in ("flower", "serial"):
        events = map(json.loads, (tmp_path / name / "events.jsonl").read_text().splitlines())
        found[name] = [event["method"] for event in events if event["event"] == "task"]
    assert found["flower"] == found["serial"]
    last = found["flower"][-1]
    assert last["ever"] > last["now"] > 0  # some had data of earlier tasks alone
    assert last["visits"] > 0


def test_prompts_on_a_frozen_backbone_equal_serial(tmp_path):
    model = {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4}
    train = {"rounds": 2, "optimizer": "adam", "lr": 0.02, "batch_size": 32, "max_steps": 2}
    compare({**BASE, "model": model, "train": train, "method": {"kind": "pip"}}, tmp_path)


def test_nodes_compute_queries_once_for_all_requests(tmp_path, monkeypatch):
    """Each request is served by a separate process, which reads cached features of earlier ones."""
    computed = []
    put = FileCacheStorage.put
    monkeypatch.setattr(FileCacheStorage, "put", lambda *args: computed.append(1) or put(*args))
    model = {"kind": "vit", "init": str(write_vit(tmp_path / "vit"))}
    train = {"rounds": 2, "optimizer": "adam", "lr": 0.02, "batch_size": 32, "max_steps": 2}
    method = {"kind": "pip", "general_layers": [0], "expert_layers": [1, 2]}
    config = {**BASE, "model": model, "train": train, "method": method}
    compare(config, tmp_path)
    assert list(tmp_path.glob("node-*/state/*/feature_cache/*.features"))
    assert len(computed) == 2  # a node and block each
    engine, _ = in_process_engine(
        {**config, "engine": {"kind": "flower", "nodes": 2}}, tmp_path
    )  # new nodes
    run({**config, "engine": {"kind": "flower", "nodes": 2}}, engine=engine)
    assert len(computed) == 2


def compare(config, tmp_path):
    """Run a config over messages and with the serial engine."""
    wanted = run({**config, "engine": {"kind": "serial"}}, out=tmp_path / "serial")
    flower = {**config, "engine": {"kind": "flower", "nodes": 2}}
    engine, transport = in_process_engine(flower, tmp_path)
    transport.make_secret_source = no_secrets
    got = run(flower, out=tmp_path / "flower", engine=engine)
    assert got.values["engine"] == "flower"
    assert got.matrix == wanted.matrix
    assert got.values["model_sha256"] == wanted.values["model_sha256"]
    sent, expected = ({**r.values["bytes"], "kept": None} for r in (got, wanted))
    assert sent == expected  # what clients store is known to their nodes alone
    assert losses(tmp_path / "flower") == losses(tmp_path / "serial")
    mine, theirs = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("flower", "serial")
    )
    for name, value in theirs.items():
        assert (mine[name] - value).abs().max() <= 1e-6 if value.numel() else True


def losses(folder):
    """Return the training loss of every round."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "round"]
