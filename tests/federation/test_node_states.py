"""Client states stay on their node, and follow a server that goes back to a checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace

import pytest
import torch
from in_process import in_process_engine

from perdure.config import parse
from perdure.contract import Method, Train
from perdure.federation.messages import NodeRequest, RoundPosition, pack, unpack
from perdure.federation.node.run import ClientStateHistory
from perdure.runs.run import run
from perdure.training.experiment import build_experiment

CONFIG = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [8]},
    "method": {"kind": "er"},
    "train": {"rounds": 3, "batch_size": 64},
    "data": {"limit": 120},
    "engine": {"kind": "flower"},
    "device": "cpu",
}


class Stop(Exception):
    pass


@pytest.mark.parametrize("back", [0, 1])
def test_a_restarted_server_ends_with_the_same_model(back, tmp_path):
    engine, _ = in_process_engine(CONFIG, tmp_path / "whole")
    wanted = run(CONFIG, out=tmp_path / "whole" / "run", engine=engine).values
    engine, _ = in_process_engine(CONFIG, tmp_path / "cut")
    seen = []

    def stop(state, event):
        seen.append(event)
        if len(seen) == 6:  # in the middle of the second task
            raise Stop

    out = tmp_path / "cut" / "run"
    with pytest.raises(Stop):
        run(CONFIG, out=out, watch=stop, engine=engine)
    there = sorted(path for path in (out / "checkpoints").iterdir() if path.is_file())
    for path in there[len(there) - back :]:
        path.unlink()  # the server is restored from an older copy than the nodes
    engine, _ = in_process_engine(CONFIG, tmp_path / "cut")
    got = run(CONFIG, out=out, resume=True, engine=engine).values
    assert got["model_sha256"] == wanted["model_sha256"]
    assert got["matrix"] == wanted["matrix"]


def test_the_server_holds_no_client_state(tmp_path):
    engine, _ = in_process_engine(CONFIG, tmp_path)
    run(CONFIG, out=tmp_path / "run", engine=engine)
    assert not (tmp_path / "run" / "clients").exists()
    assert len(list((tmp_path / "node-1").rglob("client-1/*.safetensors"))) > 0
    assert not list((tmp_path / "node-1").rglob("client-0"))


def test_sequence_numbers_grow_along_a_run():
    """Exchanges before training, rounds, exchanges at the end, then the next task."""
    steps = [
        RoundPosition(task, round=number, rounds=2, exchange=exchange)
        for task in (0, 1)
        for exchange, number in [(-1, 0), (-2, 0), (0, 0), (0, 1), (1, 2), (2, 2)]
    ]
    positions = [position.sequence_number for position in steps]
    assert positions == sorted(set(positions))
    assert replace(steps[0], attempt=3).sequence_number == steps[0].sequence_number


@dataclass(frozen=True)
class OwnHead(Method):
    """FedAvg whose clients do not send the head."""

    def exchanges(self, context):
        return [Train(private=context.network.head_names(dict(context.parameters)))]


def test_private_parameters_stay_on_the_node(tmp_path):
    config = {**CONFIG, "stream": {"kind": "permuted", "tasks": 1}}
    config["method"] = {"kind": f"{__name__}.OwnHead"}
    server = (
        build_experiment(parse({**config, "engine": {"kind": "serial"}})).initial_state().server
    )
    _, transport = in_process_engine(config, tmp_path)
    body = pack({"params": server.params, "buffers": {}, "broadcast": {}})
    updates = []
    for number in (0, 1, 1):
        request = NodeRequest("train", RoundPosition(0, number, 3, 3), (1,))
        reply = unpack(transport.node(1).serve(request, body))
        updates.append(reply["uploads"]["1"]["update"]["value"])
        assert sorted(updates[-1]) == ["fc1.bias", "fc1.weight"]
    kept = ClientStateHistory(transport.node(1).run.folder, 9).get(
        1, RoundPosition(0, 2).sequence_number
    )
    (own,) = kept.values()
    assert sorted(own) == ["head.bias", "head.weight"]
    assert not torch.equal(own["head.weight"], server.params["head.weight"])
    for name, value in updates[1].items():
        torch.testing.assert_close(updates[2][name], value, rtol=0, atol=0)
    fresh = in_process_engine(config, tmp_path / "fresh")[1].node(1)
    other = unpack(fresh.serve(request, body))["uploads"]["1"]["update"]["value"]
    assert not torch.equal(
        other["fc1.weight"], updates[1]["fc1.weight"]
    )  # the stored head was used


def test_the_last_state_before_a_position_is_returned(tmp_path):
    history = ClientStateHistory(tmp_path, keep=3)
    assert history.get(0, 5) == {}
    for position in (1, 2, 200_000_000, 3):
        history.put(0, position, {"at": position, "x": torch.tensor([position])})
    assert history.get(0, 300_000_000)["at"] == 200_000_000
    assert history.get(0, 3)["at"] == 2  # going back forgets what came later
    assert history.get(0, 300_000_000)["at"] == 2
    assert history.get(1, 3) == {}


def test_an_altered_state_is_refused(tmp_path):
    history = ClientStateHistory(tmp_path, keep=3)
    history.put(0, 1, {"x": torch.ones(3)})
    (path,) = (tmp_path / "client-0").iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match="truncated or altered"):
        history.get(0, 2)
    shutil.rmtree(tmp_path / "client-0")
