"""Over real processes with TLS and node keys, a run ends with the weights of engine serial."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from perdure.runs.runner import run

BASE = {
    "stream": {"kind": "split", "tasks": 2},
    "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"rounds": 1, "batch_size": 64},
    "data": {"limit": 240},
    "device": "cpu",
}
PROMPTED = {
    **BASE,
    "model": {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4},
    "train": {"rounds": 1, "optimizer": "adam", "lr": 0.02, "batch_size": 32, "max_steps": 2},
}


@pytest.mark.parametrize("kind", ["fedavg", "fot", "fedprotip", "special", "stamp", "pip"])
def test_the_weights_are_those_of_serial(kind, federation, tmp_path):
    config = {**(PROMPTED if kind == "pip" else BASE), "method": {"kind": kind}}
    got = federation.run(config, kind)
    wanted = run({**config, "engine": {"kind": "serial"}}, out=tmp_path / "serial").values
    assert got["engine"] == "flower"
    assert got["failures"] == []
    assert got["matrix"] == wanted["matrix"]
    assert got["bytes"] == wanted["bytes"]
    mine = load_file(federation.home / f"run-{kind}" / "model" / "model.safetensors")
    theirs = load_file(tmp_path / "serial" / "model" / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if value.numel():
            assert (mine[name].double() - value.double()).abs().max() <= 1e-6, name


def test_secure_sums_over_real_messages(federation, tmp_path):
    config = {**BASE, "privacy": {"secagg": True}}
    got = federation.run(config, "secagg")
    assert got["failures"] == []
    plain = {**BASE, "engine": {"kind": "serial"}}
    run(plain, out=tmp_path / "serial")
    mine = load_file(federation.home / "run-secagg" / "model" / "model.safetensors")
    theirs = load_file(tmp_path / "serial" / "model" / "model.safetensors")
    for name in (name for name in theirs if name.startswith("params/")):
        assert (mine[name] - theirs[name]).abs().max() < 1e-3, name
