"""`train.aggregation`: the rules in whole rounds, on all engines, and where they are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perdure.config import parse
from perdure.contract import Method, Needs, Preferences, Train
from perdure.contract.uploads import Sum, stack_of_one
from perdure.core.errors import UserError
from perdure.runs.run import run
from perdure.training.collector import UploadCollector

CONFIG = {
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 5, "partition": {"kind": "dirichlet", "alpha": 0.3}},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 2, "max_steps": 2},
    "data": {"limit": 200},
    "engine": {"kind": "serial"},
    "device": "cpu",
}
RULES = ["median", {"kind": "trimmed_mean", "fraction": 0.3}, "norm_bound"]


def with_rule(rule, **changes):
    return {**CONFIG, **changes, "train": {**CONFIG["train"], "aggregation": rule}}


def collected(rule, uploads, weights):
    collector = UploadCollector()
    aggregation = parse({"train": {"aggregation": rule}}).train.aggregation
    collector.rule = None if aggregation.is_sum else aggregation
    for client, upload in enumerate(uploads):
        collector.add(stack_of_one(client, weights[client], upload))
    collector.close()
    return collector.collected


@pytest.mark.parametrize(
    ("rule", "expected"), [("mean", 26.5), ("median", 3.5), (RULES[1], 3.5), ("norm_bound", 2.5)]
)
def test_a_rule_is_applied_to_updates_and_buffers_and_to_nothing_else(rule, expected):
    """Values 0, 3, 4, 99: the weights of the clients count in the mean of other fields alone."""
    uploads = [
        {name: Sum({"w": torch.full((1,), float(value))}) for name in ("update", "buffers", "more")}
        for value in (0, 3, 4, 99)
    ]
    found = collected(rule, uploads, (1.0, 1.0, 1.0, 1.0))
    assert found.mean("update")["w"].item() == pytest.approx(expected)
    assert found.mean("buffers")["w"].item() == pytest.approx(expected)
    assert found.mean("more")["w"].item() == pytest.approx(26.5)
    if rule != "mean":
        heavy = collected(rule, uploads, (1.0, 1.0, 1.0, 1e9))
        assert heavy.mean("update")["w"].item() == pytest.approx(expected)
        assert heavy.mean("more")["w"].item() == pytest.approx(99)


def test_updates_of_stacked_clients_and_of_several_tensors_are_bounded_together():
    rows = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    rows[0] *= 50
    uploads = [{"update": Sum({"a": row[:4].reshape(2, 2), "b": row[4:]})} for row in rows]
    found = collected("norm_bound", uploads, (1.0,) * 6).mean("update")
    norms = np.linalg.norm(rows.numpy(), axis=1)
    expected = (rows.numpy() * np.minimum(1, np.median(norms) / norms)[:, None]).mean(0)
    np.testing.assert_allclose(found["a"].flatten(), expected[:4], rtol=1e-5)
    np.testing.assert_allclose(found["b"], expected[4:], rtol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_engines_agree(rule):
    serial = run(with_rule(rule)).values
    vector = run(with_rule(rule, engine={"kind": "vector"})).values
    mean = run(CONFIG).values
    assert serial["matrix"]["task_agnostic"][0] == pytest.approx(
        vector["matrix"]["task_agnostic"][0], abs=0.02
    )
    assert serial["model_sha256"] != mean["model_sha256"]


def test_the_mean_is_what_it_was_without_the_key():
    assert run(with_rule("mean")).values["model_sha256"] == run(CONFIG).values["model_sha256"]


class Buffered(Method):
    """FedAvg that closes a round after two uploads."""

    def exchanges(self, context):
        return [Train(buffer_size=2)]


class Weighted(Method):
    """FedAvg with other weights."""

    @property
    def needs(self):
        return Needs(prefers=Preferences(weighting="own"))


REFUSED = {
    "secagg": ({"privacy": {"secagg": True}}, "privacy.secagg shows the server no client's update"),
    "noise": (
        {"privacy": {"clip": 1.0, "noise": 1.0}},
        "privacy.clip with mode 'central' protects a sum of updates",
    ),
    "combine": ({"method": {"kind": "fedadam"}}, "method 'fedadam' combines the updates itself"),
    "scaffold": (
        {"method": {"kind": "scaffold"}},
        "method 'scaffold' sums other fields of uploads itself",
    ),
    "fedomg": ({"method": {"kind": "fedomg"}}, "method 'fedomg' combines the updates itself"),
    "buffered": ({"method": {"kind": f"{__name__}.Buffered"}}, "a round of .* of several ages"),
    "weights": ({"method": {"kind": f"{__name__}.Weighted"}}, ".* weights the updates itself"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_where_a_rule_is_refused(case):
    changes, reason = REFUSED[case]
    with pytest.raises(UserError, match=f"train.aggregation: must be mean, since {reason}"):
        run(with_rule("median", **changes))


@pytest.mark.parametrize(("clients", "fraction"), [(4, 0.2), (2, 0.49), (1, 0.49), (3, 0.33)])
def test_a_trimmed_mean_that_would_be_the_mean_is_refused(clients, fraction):
    rule = {"kind": "trimmed_mean", "fraction": fraction}
    sentence = f"fraction: must be large enough to leave out one of {clients} clients at each end"
    with pytest.raises(UserError, match=sentence):
        run(with_rule(rule, clients={"count": 5, "per_round": clients}))


def test_noise_on_every_upload_is_compatible():
    privacy = {"clip": 1.0, "noise": 0.5, "mode": "local"}
    assert run(with_rule("median", privacy=privacy)).values["rounds"] == 2


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            "mode",
            "train.aggregation.kind: must be mean, median, trimmed_mean, norm_bound, or a dotted",
        ),
        ({"kind": "trimmed_mean", "fraction": 0.5}, "train.aggregation.fraction: must be"),
        ({"kind": "median", "fraction": 0.1}, "train.aggregation.fraction: unknown key"),
        ({"kind": "norm_bound", "norm": 0}, "train.aggregation.norm: must be"),
    ],
)
def test_mistakes_in_the_key(value, sentence):
    with pytest.raises(UserError, match=sentence):
        parse({"train": {"aggregation": value}})
