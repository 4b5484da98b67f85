"""Secure sums over messages: nodes mask uploads, the server opens sums, clients may drop out."""

from __future__ import annotations

import json

import pytest
import torch
from in_process import RUN, in_process_engine, no_secrets
from safetensors.torch import load_file

from perdure.contract.uploads import FailedUpload
from perdure.federation.messages import pack, unpack
from perdure.runs.run import run

CONFIG = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 5},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 2, "batch_size": 64},
    "data": {"limit": 200},
    "engine": {"kind": "flower"},
    "privacy": {"secagg": True},
    "device": "cpu",
}


def model_of(path):
    return load_file(path / "model" / "model.safetensors")


@pytest.mark.parametrize("kind", ["fedavg", "fot"])
def test_the_model_equals_that_of_plain_sums_up_to_rounding(kind, tmp_path):
    config = {**CONFIG, "method": {"kind": kind}}
    engine, transport = in_process_engine(config, tmp_path)
    transport.make_secret_source = no_secrets
    values = run(config, out=tmp_path / "run", engine=engine).values
    plain = {**config, "privacy": {}, "engine": {"kind": "serial"}}
    run(plain, out=tmp_path / "plain")
    mine, theirs = model_of(tmp_path / "run"), model_of(tmp_path / "plain")
    params = [name for name in theirs if name.startswith("params/")]
    assert params
    for name in params:
        assert (mine[name] - theirs[name]).abs().max() < 1e-3
    assert not values["failures"]
    assert not values["repeated_rounds"]
    kinds = {kind for _, kind, _ in transport.log}
    assert "public_keys" in kinds
    assert "reveal" not in kinds  # a round without dropouts costs one message


def test_opening_exchanges_are_masked_too(tmp_path):
    """Their sessions have negative positions."""
    config = {**CONFIG, "method": {"kind": "phased.Phased"}}
    engine, transport = in_process_engine(config, tmp_path)
    seen = {}

    def record(node, request, reply):
        if request.kind == "exchange":
            seen.setdefault(request.position.exchange, []).append(unpack(reply))
        return reply

    transport.spoil = record
    values = run(config, out=tmp_path / "run", engine=engine).values
    assert not values["failures"]
    assert sorted(seen) == [-2, 1, 2]
    for position in (-2, 2):
        assert all(reply["uploads"] == {} and reply["masked"] for reply in seen[position])
    assert not any(reply["masked"] for reply in seen[1])  # nothing travels
    run({**config, "privacy": {}, "engine": {"kind": "serial"}}, out=tmp_path / "plain")
    mine, theirs = model_of(tmp_path / "run"), model_of(tmp_path / "plain")
    for name in (name for name in theirs if name.startswith("params/")):
        assert (mine[name] - theirs[name]).abs().max() < 1e-3


def test_only_masked_bytes_leave_a_node(tmp_path):
    engine, transport = in_process_engine(CONFIG, tmp_path)
    seen = []

    def record(node, request, reply):
        if request.kind == "train":
            seen.append(unpack(reply))
        return reply

    transport.spoil = record
    run(CONFIG, engine=engine)
    assert len(seen) == 20
    for tree in seen:
        assert tree["uploads"] == {}
        (data,) = tree["masked"].values()
        assert data.dtype == torch.uint8


def test_a_client_may_drop_out(tmp_path):
    engine, transport = in_process_engine(CONFIG, tmp_path)

    def drop(node, request, reply):
        gone = request.kind == "train" and node == 2 and request.position.round == 1
        return FailedUpload(node, "no answer within 600 s") if gone else reply

    transport.spoil = drop
    values = run(CONFIG, engine=engine).values
    assert values["client_updates"] == 18
    assert {failure["client"] for failure in values["failures"]} == {2}
    assert "reveal" in {kind for _, kind, _ in transport.log}


def test_an_upload_that_is_not_masked_is_refused(tmp_path):
    engine, transport = in_process_engine(CONFIG, tmp_path)
    _, plain_transport = in_process_engine({**CONFIG, "privacy": {}}, tmp_path / "open")

    def spoil(node, request, reply):
        if request.kind != "train" or node != 1:
            return reply
        return plain_transport.node(node).serve(request, transport.body)

    exchange = transport.send_and_receive

    def remember(headers, body, limit):
        transport.body = pack(
            {name: part for name, part in unpack(body).items() if name != "sum_request"}
        )
        return exchange(headers, body, limit)

    transport.send_and_receive, transport.spoil = remember, spoil
    values = run(CONFIG, engine=engine).values
    assert {failure["client"] for failure in values["failures"]} == {1}
    assert "not masked" in values["failures"][0]["reason"]


def test_secrets_stay_in_a_private_folder_and_are_new_for_each_task(tmp_path):
    engine, transport = in_process_engine(CONFIG, tmp_path)
    masters = []

    def look(node, request, reply):
        name = f"client-0-task-{request.position.task}.json"
        path = tmp_path / "node-0" / "state" / RUN / "secure" / name
        if node == 0 and request.kind == "public_keys":
            masters.append(json.loads(path.read_text())["master"])
            assert path.parent.stat().st_mode & 0o077 == 0
        return reply

    transport.spoil = look
    run(CONFIG, engine=engine)
    assert len(masters) == 2
    assert masters[0] != masters[1]


def test_nodes_clip_uploads_and_draw_their_noise(tmp_path):
    config = {**CONFIG, "privacy": {"clip": 0.1, "noise": 0.01, "mode": "local"}}
    hashes = []
    for name in ("a", "b"):
        engine, _ = in_process_engine(config, tmp_path / name)
        values = run(config, engine=engine).values
        hashes.append(values["model_sha256"])
        assert values["privacy"]
    assert hashes[0] != hashes[1]  # drawn from the machine, not from the seed


def test_nodes_add_local_noise_to_updates_that_the_server_sees(tmp_path):
    """STAMP's server aligns single updates; each leaves its node clipped and noisy."""
    privacy = {"clip": 0.1, "noise": 50.0, "mode": "local"}
    config = {**CONFIG, "method": {"kind": "stamp"}, "privacy": privacy}
    engine, transport = in_process_engine(config, tmp_path)
    spreads = []

    def look(node, request, reply):
        if request.kind == "train":
            for upload in unpack(reply)["uploads"].values():
                values = upload["update"]["value"].values()
                spreads.append(float(torch.cat([v.flatten() for v in values]).std()))
        return reply

    transport.spoil = look
    values = run(config, engine=engine).values
    assert "against the server too" in values["privacy"]["claim"]
    assert spreads
    assert min(spreads) > 4  # 0.1 * 50 on each number
    assert max(spreads) < 6


def test_fot_on_nodes_protects_layers_with_clipping(tmp_path):
    config = {**CONFIG, "method": {"kind": "fot"}, "privacy": {"clip": 1.0, "secagg": True}}
    engine, _ = in_process_engine(config, tmp_path)
    events = []
    run(config, engine=engine, watch=lambda _, event: events.append(event))
    used = [event["method"]["used"] for event in events if event["event"] == "task"]
    assert len(used) == 2
    assert all(fraction > 0 for each in used for fraction in each.values())
