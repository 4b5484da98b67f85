"""Clients that train as the others do and send something else: robust rules against the mean.

6 of 20 clients send their update times -10, or 2 of 20 times -30. tools/measure_robust.py measures
more attacks and seeds; its table is in docs/security.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from in_process import in_process_engine

from perdure.core.errors import RunError
from perdure.runs.run import run

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from measure_robust import RULES, hostile_run

CONFIG = {
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 20},
    "model": {"kind": "mlp", "hidden": [32]},
    "train": {"rounds": 8, "local_epochs": 2, "batch_size": 16, "lr": 0.1},
    "device": "cpu",
}
SLACK = {"median": 0.1, "trimmed_mean 0.3": 0.1, "norm_bound": 0.15}
"""Bounded updates of 6 hostile clients cancel those of 6 others, so that training is slower."""
HOSTILE = pytest.mark.parametrize(("hostile", "factor"), [(6, -10.0), (2, -30.0)])


def config_of(rule, method="fedavg"):
    train = {**CONFIG["train"], "aggregation": RULES[rule]}
    return {**CONFIG, "train": train, "method": {"kind": method}}


def accuracy(rule, hostile, factor, method="fedavg"):
    """Return the accuracy, or 0 if the model did not stay finite."""
    try:
        values = hostile_run(config_of(rule, method), range(hostile), factor)
    except RunError:
        return 0.0
    return values["metrics"]["task_agnostic"]["ACC"]


@pytest.fixture(scope="module")
def honest():
    return accuracy("mean", 0, 1.0)


@HOSTILE
def test_a_minority_owns_the_mean(hostile, factor, honest):
    assert honest > 0.8
    assert accuracy("mean", hostile, factor) < 0.3


@HOSTILE
@pytest.mark.parametrize("rule", SLACK)
def test_a_robust_rule_holds(rule, hostile, factor, honest):
    assert accuracy(rule, hostile, factor) > honest - SLACK[rule]


@pytest.mark.parametrize("rule", ["median", "norm_bound"])
def test_a_robust_rule_holds_with_fot(rule, honest):
    assert accuracy(rule, 6, -10.0, "fot") > honest - SLACK[rule]


@pytest.mark.parametrize("rule", ["median", "trimmed_mean 0.3", "norm_bound"])
def test_a_federation_has_the_same_rules(rule, tmp_path):
    """The model of a federation has the bits of the simulated one."""
    small = {"clients": {"count": 4}, "data": {"limit": 160}, "engine": {"kind": "flower"}}
    config = {**config_of(rule), **small}
    config["train"] = {**config["train"], "rounds": 2, "max_steps": 2}
    engine, _ = in_process_engine(config, tmp_path)
    federated = run(config, engine=engine).values["model_sha256"]
    assert federated == run({**config, "engine": {"kind": "serial"}}).values["model_sha256"]
    mean = {**config, "train": {**config["train"], "aggregation": "mean"}}
    assert federated != run({**mean, "engine": {"kind": "serial"}}).values["model_sha256"]
