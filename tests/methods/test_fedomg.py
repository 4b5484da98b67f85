"""FedOMG: the server's alignment within a run."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import perdure
from perdure.algebra.alignment import Alignment
from perdure.config import parse
from perdure.contract import Change, CollectedUploads, Server
from perdure.core.errors import UserError
from perdure.methods.fedomg import FedOmg
from perdure.methods.parts.alignment import AlignmentRecord
from perdure.training.experiment import build_experiment


def config(method, engine="serial", **changes):
    values = {
        "stream": {"kind": "pool", "tasks": 2, "classes_per_task": 2},
        "data": {"limit": 200},
        "clients": {"count": 3},
        "model": {"hidden": [8]},
        "method": method,
        "train": {"rounds": 2, "local_epochs": 1, "batch_size": 16},
        "engine": {"kind": engine},
    }
    return values | changes


def final(values):
    """The model at the end of a run."""
    last = {}
    perdure.run(values, watch=lambda state, _: last.update(state.server.params))
    return last


def uploaded(rows):
    each = {client: {"w": row} for client, row in enumerate(rows)}
    return CollectedUploads(per_client={"update": each}, client_weights=dict.fromkeys(each, 1.0))


def test_the_server_aligns_the_updates():
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    method = FedOmg(kappa=0.4, scale="paper")
    change = method.align_clients(Server({"w": torch.ones(6)}), uploaded(rows), None)
    g = rows.double().numpy()
    wanted = Alignment(0.4, "mean", "paper").coefficients(g @ g.T) @ g
    np.testing.assert_allclose(change["w"], wanted, atol=1e-6)


@pytest.mark.parametrize("diagnostics", [False, True])
def test_the_change_is_applied_unchanged(diagnostics):
    """With one client, as printed, GA is (1 + kappa) times its update."""
    options = {"kind": "fedomg", "scale": "paper", "kappa": 0.5, "diagnostics": diagnostics}
    one_round = {
        "clients": {"count": 1},
        "stream": {"kind": "pool", "tasks": 1, "classes_per_task": 2},
        "train": {"rounds": 1, "batch_size": 16},
    }
    start = build_experiment(parse(config(options, **one_round))).initial_state().server.params
    mine, plain = (final(config(m, **one_round)) for m in (options, {"kind": "fedavg"}))
    for name, value in start.items():
        torch.testing.assert_close(mine[name] - value, 1.5 * (plain[name] - value))


def test_updates_are_each_and_running_statistics_are_sums():
    conv = {"kind": "conv", "width": 4, "norm": "batch"}
    found = perdure.run(config({"kind": "fedomg"}, model=conv)).values["bytes"]["types"]
    assert found == {"update": "Each", "buffers": "Sum"}


def test_uploads_are_those_of_fedavg():
    mine, plain = (perdure.run(config({"kind": kind})).values for kind in ("fedomg", "fedavg"))
    assert mine["bytes"] | {"types": {"update": "Sum"}} == plain["bytes"]
    assert mine["bytes"]["types"] == {"update": "Each"}
    assert mine["model_sha256"] != plain["model_sha256"]


@pytest.mark.parametrize("method", [{}, {"solver": "published"}, {"scope": "layer"}])
def test_engines_agree(method):
    train = {"rounds": 1, "batch_size": 16, "max_steps": 3}
    serial, vector = (
        final(config({"kind": "fedomg", **method}, engine, train=train))
        for engine in ("serial", "vector")
    )
    for name, value in serial.items():
        torch.testing.assert_close(value, vector[name], atol=1e-5, rtol=0)


def test_diagnostics_on_request(tmp_path):
    perdure.run(config({"kind": "fedomg", "diagnostics": True}), out=tmp_path / "a")
    lines = (tmp_path / "a" / "events.jsonl").read_text().splitlines()
    seen = json.loads(lines[0])["method"]["clients"]
    assert -1 <= seen["cosine"] <= 1
    assert 0 <= seen["conflicts"] <= 1


def test_diagnostics_by_hand():
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    method, server = FedOmg(diagnostics=True), Server({"w": torch.zeros(2)}, {}, AlignmentRecord())
    change = Change({"w": torch.ones(2)}, {}, server.state)
    after = method.record(server, change, uploaded(rows), None)
    assert after.params is change.params
    seen = method.diagnose(replace(server, state=after.state), None).numbers["clients"]
    assert seen["cosine"] == pytest.approx((2**-0.5 - 1 - 2**-0.5) / 3)
    assert seen["conflicts"] == pytest.approx(2 / 3)


def test_without_diagnostics_nothing_is_recorded(tmp_path):
    perdure.run(config({"kind": "fedomg"}), out=tmp_path / "a")
    lines = (tmp_path / "a" / "events.jsonl").read_text().splitlines()
    assert not any("method" in json.loads(line) for line in lines)


def test_one_client_has_no_pair(tmp_path):
    values = config({"kind": "fedomg", "diagnostics": True}, clients={"count": 1})
    perdure.run(values, out=tmp_path / "a")
    line = (tmp_path / "a" / "events.jsonl").read_text().splitlines()[0]
    assert json.loads(line)["method"] == {"clients": {"cosine": None, "conflicts": None}}


def test_one_client_alone():
    values = config({"kind": "fedomg", "scale": "unit"}, clients={"count": 1})
    plain = config({"kind": "fedavg"}, clients={"count": 1})
    mine, theirs = (perdure.run(v).matrix["task_agnostic"] for v in (values, plain))
    assert mine == theirs


@pytest.mark.parametrize(
    ("key", "bad"), [("kappa", -1), ("solver", "magic"), ("scale", 3), ("diagnostics", 7)]
)
def test_bad_values_are_refused_by_name(key, bad):
    with pytest.raises(UserError, match=f"method.{key}: must be .*, got {bad!r}"):
        perdure.run(config({"kind": "fedomg", key: bad}))
