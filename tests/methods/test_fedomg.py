"""FedOMG: the server's alignment within a run."""

import json

import numpy as np
import pytest
import torch

import perdure
from perdure.algebra.alignment import Alignment
from perdure.errors import UserError
from perdure.federation.messages import Each, Report
from perdure.methods.base import Server
from perdure.methods.fedomg import FedOmg


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


def report(rows):
    each = {client: {"w": row} for client, row in enumerate(rows)}
    return Report(each={"update": each}, shares=dict.fromkeys(each, 1.0))


def test_the_server_applies_the_aligned_update():
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    method = FedOmg(kappa=0.4, global_lr=0.5, rescale="none")
    after = method.aggregate(Server({"w": torch.ones(6)}), report(rows), None)
    g = rows.double().numpy()
    change = Alignment(0.4, "mean", "none").coefficients(g @ g.T) @ g
    np.testing.assert_allclose(after.params["w"], 1 + 0.5 * change, atol=1e-6)


def test_updates_are_each_and_running_statistics_are_sums():
    upload = FedOmg().finish(None, {"w": torch.ones(2)}, {"m": torch.ones(1)}).upload
    assert isinstance(upload["update"], Each)
    assert not isinstance(upload["buffers"], Each)


def test_it_sends_what_fedavg_sends():
    mine, plain = (perdure.run(config({"kind": kind})).values for kind in ("fedomg", "fedavg"))
    assert mine["bytes"] | {"types": {"update": "Sum"}} == plain["bytes"]
    assert mine["bytes"]["types"] == {"update": "Each"}
    assert mine["model_sha256"] != plain["model_sha256"]


@pytest.mark.parametrize("method", [{}, {"solver": "published"}, {"scope": "layer"}])
def test_engines_agree(method):
    runs = []
    for engine in ("serial", "vector"):
        last = {}
        values = config({"kind": "fedomg", **method}, engine)
        perdure.run(values, watch=lambda state, _, last=last: last.update(state.server.params))
        runs.append(last)
    for name, value in runs[0].items():
        torch.testing.assert_close(value, runs[1][name], atol=2e-5, rtol=1e-4)


def test_diagnostics_on_request(tmp_path):
    perdure.run(config({"kind": "fedomg", "diagnostics": True}), out=tmp_path / "a")
    lines = (tmp_path / "a" / "events.jsonl").read_text().splitlines()
    seen = json.loads(lines[0])["method"]["clients"]
    assert -1 <= seen["cosine"] <= 1
    assert 0 <= seen["conflicts"] <= 1


def test_diagnostics_by_hand():
    rows = torch.tensor([[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    method = FedOmg(diagnostics=True)
    after = method.aggregate(Server({"w": torch.zeros(2)}), report(rows), None)
    seen = method.diagnose(after, None)["clients"]
    assert seen["cosine"] == pytest.approx((2**-0.5 - 1 - 2**-0.5) / 3)
    assert seen["conflicts"] == pytest.approx(2 / 3)


def test_one_client_alone():
    values = config({"kind": "fedomg", "rescale": "unit"}, clients={"count": 1})
    plain = config({"kind": "fedavg"}, clients={"count": 1})
    mine, theirs = (perdure.run(v).matrix["task_agnostic"] for v in (values, plain))
    assert mine == theirs


@pytest.mark.parametrize(("key", "bad"), [("kappa", -1), ("solver", "magic"), ("rescale", 3)])
def test_bad_values_are_refused_by_name(key, bad):
    with pytest.raises(UserError, match=f"method.{key}: got {bad!r}"):
        perdure.run(config({"kind": "fedomg", key: bad}))
