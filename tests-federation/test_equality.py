"""Over real processes with TLS and node keys, a run ends with the weights of engine serial."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from perdure.runs.run import run

HERE = Path(__file__).parent
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


CUSTOM = {
    "public_draws.PublicFOT": HERE / "public_draws.py",
    "public_draws.PublicFedProTIP": HERE / "public_draws.py",
    "phased.Phased": HERE.parent / "tests" / "federation" / "phased.py",
}
"""Custom methods, and the files that are copied beside the config."""


def sent(result):
    """Return the bytes that were sent; those that clients store are known to their nodes alone."""
    return {key: value for key, value in result["bytes"].items() if key != "kept"}


def losses(folder):
    """Return the training loss of every round."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "round"]


@pytest.mark.parametrize("kind", ["fedavg", "special", "stamp", "pip", "er", *CUSTOM])
def test_the_weights_are_those_of_serial(kind, federation, tmp_path):
    if kind in CUSTOM:
        shutil.copy(CUSTOM[kind], federation.home / CUSTOM[kind].name)
    config = {**(PROMPTED if kind == "pip" else BASE), "method": {"kind": kind}}
    got = federation.run(config, kind)
    alone = federation.home / f"serial-{kind}.yaml"
    alone.write_text(yaml.safe_dump({**config, "engine": {"kind": "serial"}}))
    wanted = run(alone, out=tmp_path / "serial").values
    assert got["engine"] == "flower"
    assert got["failures"] == []
    assert got["matrix"] == wanted["matrix"]
    assert sent(got) == sent(wanted)
    assert losses(federation.home / f"run-{kind}") == losses(tmp_path / "serial")
    federated = load_file(federation.home / f"run-{kind}" / "model" / "model.safetensors")
    serial = load_file(tmp_path / "serial" / "model" / "model.safetensors")
    assert federated.keys() == serial.keys()
    for name, value in serial.items():
        if value.numel():
            assert (federated[name].double() - value.double()).abs().max() <= 1e-6, name


def test_sketches_of_real_nodes_cannot_be_repeated(federation):
    config = {**BASE, "method": {"kind": "fot"}}
    got = federation.run(config, "secret")
    wanted = run({**config, "engine": {"kind": "serial"}}).values
    assert got["failures"] == []
    assert got["model_sha256"] != wanted["model_sha256"]
    first, same = (values["matrix"]["task_aware"][0][0] for values in (got, wanted))
    assert first == same  # the first sketch is drawn after the first task


def test_secure_sums_equal_plain_sums_up_to_rounding(federation, tmp_path):
    config = {**BASE, "privacy": {"secagg": True}}
    got = federation.run(config, "secagg")
    assert got["failures"] == []
    plain = {**BASE, "engine": {"kind": "serial"}}
    run(plain, out=tmp_path / "serial")
    federated = load_file(federation.home / "run-secagg" / "model" / "model.safetensors")
    serial = load_file(tmp_path / "serial" / "model" / "model.safetensors")
    for name in (name for name in serial if name.startswith("params/")):
        assert (federated[name] - serial[name]).abs().max() < 1e-3, name
