"""`privacy.min_rows`: who takes part, and what methods do if nobody may send anything."""

from __future__ import annotations

import logging

import pytest
import torch
from prompt_runs import SMALL

from perdure import run
from perdure.config import parse
from perdure.contract.context import in_large_class
from perdure.core.errors import UserError
from perdure.methods.registry import KINDS
from perdure.training import exchange
from perdure.training.experiment import build_experiment
from perdure.training.sampling import clients_with_data

CONFIG = {
    "data": {"limit": 120},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 2, "max_steps": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
}
OPTIONS = {
    "fedprotip gaussian": {"kind": "fedprotip", "router": "gaussian", "diagnostics": True},
    "fedprotip sketch": {"kind": "fedprotip", "transport": "sketch"},
    "fedprotip union": {"kind": "fedprotip", "bases": "union"},
    "fedncm raw": {"kind": "fedncm", "inputs": "raw"},
    "calibrate quadratic": {"kind": "calibrate", "head": "quadratic"},
    "er calibrate": {"kind": "er", "with": [{"kind": "calibrate"}]},
    "fed-dualp mean": {"kind": "fed-dualp", "keys": "mean"},
}
METHODS = {**{kind: {"kind": kind} for kind in KINDS}, **OPTIONS}
PROMPTED = ("fed-l2p", "fed-dualp", "pip")


def config_of(method, **privacy):
    base = SMALL if method["kind"] in PROMPTED else CONFIG
    return {**base, "method": method, "privacy": privacy}


def test_rows_of_large_classes():
    labels = torch.tensor([4, 4, 4, 0, 0, 7])
    assert in_large_class(labels, 2).tolist() == [True] * 5 + [False]
    assert in_large_class(labels, 0).all()
    assert in_large_class(torch.rand(3), 8).all()
    assert in_large_class(labels[:0], 8).shape == (0,)


def test_small_clients_take_no_part(caplog):
    sizes = build_experiment(parse(CONFIG)).task(0).partition.sizes
    least = int(min(sizes)) + 1
    config = {**CONFIG, "privacy": {"min_rows": least}}
    task = build_experiment(parse(config)).task(0)
    assert clients_with_data(task) == [c for c in range(3) if sizes[c] >= least]
    assert all(len(task.partition.index(c)) in (0, sizes[c]) for c in range(3))
    result = run(config)
    assert f"clients with fewer than {least} rows take no part in this task" in caplog.text
    assert result.values["client_updates"] < 12


def test_a_minimum_that_no_client_reaches_is_refused():
    with pytest.raises(UserError, match=r"privacy.min_rows: must be at most \d+, the rows of the"):
        run({**CONFIG, "privacy": {"min_rows": 500}})


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_methods_without_any_statistics(method, monkeypatch, caplog):
    """A run continues where all clients have too few rows for what is sent beside the updates."""
    everybody = exchange.participants

    def nobody(experiment, asked, context):
        return [] if asked.communicates else everybody(experiment, asked, context)

    monkeypatch.setattr(exchange, "participants", nobody)
    caplog.set_level(logging.WARNING)
    matrix = run(config_of(method)).matrix["task_agnostic"]
    assert matrix[1][0] is not None
    sends = method["kind"] in ("fot", "fedprotip", "fedncm", "fedlda", "fedridge", "calibrate")
    if sends:
        assert "no client has enough rows (privacy.min_rows) to send anything" in caplog.text


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_methods_without_any_large_class(method, caplog):
    """Clients have enough rows of a task, but of no class."""
    partition = {"count": 2, "partition": {"kind": "iid"}}
    config = {**config_of(method, min_rows=12), "clients": partition}
    result = run(config)
    assert result.values["client_updates"] == (8 if result.values["rounds"] else 0)
    if method["kind"] in ("fedncm", "fedlda", "fedridge", "calibrate"):
        assert "to send anything" in caplog.text
    if method["kind"] == "pip":
        assert "pip: nothing is known about classes" in caplog.text


def test_a_missing_class_is_never_predicted(caplog):
    """One client has two rows of class 2; of the others all have enough."""
    x, y = torch.rand(62, 1, 4, 4), torch.tensor([0] * 30 + [1] * 30 + [2] * 2)
    x[:30] += 1
    config = {
        **CONFIG, "stream": {"kind": "split", "tasks": 1}, "clients": {"count": 1}, "data": {},
        "method": {"kind": "fedncm", "inputs": "raw"}, "privacy": {"min_rows": 8},
    }  # fmt: skip
    data = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    matrix = run(config, data=data).matrix["task_agnostic"]
    assert matrix[0][0] == pytest.approx(60 / 62)
    assert "fedncm: nothing is known about classes 2" in caplog.text


@pytest.mark.parametrize("kind", ["fedavg", "fot", "fedprotip", "fedncm"])
def test_a_minimum_that_all_groups_reach_changes_nothing(kind):
    config = {**config_of({"kind": kind}), "clients": {"count": 2}}
    plain, least = run(config), run({**config, "privacy": {"min_rows": 2}})
    assert plain.values["model_sha256"] == least.values["model_sha256"]
    assert plain.matrix == least.matrix


@pytest.mark.parametrize("model", ["vit", "conv", "mlp"])
def test_clients_without_any_large_class_send_zeros(model):
    """No network is asked for the features of no rows, which some cannot compute."""
    models = {"vit": SMALL["model"], "mlp": CONFIG["model"]}
    method = {"kind": "fedavg", "with": [{"kind": "calibrate"}]}
    sections = {"model": models.get(model, {"kind": model}), "clients": {"count": 2}}
    assert run({**config_of(method, min_rows=12), **sections}).matrix["task_agnostic"][1]
