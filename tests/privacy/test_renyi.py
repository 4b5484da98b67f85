"""Epsilon against values of dp-accounting and formulas derived by hand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, stats

import perdure
from perdure.config import parse
from perdure.contract import (
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    Exchange,
    Method,
    Server,
    Sum,
    Train,
)
from perdure.privacy.accounting import RoundGroup, epsilon, sampled_epsilon
from perdure.privacy.noise import ClipAndNoise
from perdure.training.experiment import build_experiment
from perdure.training.privacy import Releases, privacy_summary
from perdure.training.sampling import clients_with_data, sample_clients
from perdure.training.state import RunState

DELTA = 1e-5


@pytest.mark.parametrize(("noise", "releases"), [(1.0, 1), (4.0, 20), (0.7, 3)])
def test_epsilon_is_the_best_renyi_bound(noise: float, releases: int) -> None:
    """RDP of k Gaussian releases is a k / (2 s^2); converted as in Canonne et al. 2020."""

    def bound(a: float) -> float:
        converted = math.log1p(-1 / a) - math.log(DELTA * a) / (a - 1)
        return float(a * releases / (2 * noise**2) + converted)

    best = optimize.minimize_scalar(bound, bounds=(1.01, 500), method="bounded").fun
    assert best * 0.999 <= epsilon(noise, releases, DELTA) <= best * 1.02


def test_epsilon_is_at_least_the_exact_one() -> None:
    """Of the Gaussian mechanism, by its delta for an epsilon (Balle and Wang 2018)."""
    for noise, releases in ((1.0, 1), (4.0, 20)):
        mu = math.sqrt(releases) / noise

        def excess(value: float, mu: float = mu) -> float:
            upper = stats.norm.cdf(mu / 2 - value / mu)
            return float(upper - math.exp(value) * stats.norm.cdf(-mu / 2 - value / mu)) - DELTA

        exact = optimize.brentq(excess, 0, 60)
        found = epsilon(noise, releases, DELTA)
        assert exact <= found <= exact * 1.25


def test_sampling_without_replacement_is_that_of_dp_accounting() -> None:
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    part = dp.SampledWithoutReplacementDpEvent(1000, 20, dp.GaussianDpEvent(2.0))
    accountant.compose(dp.SelfComposedDpEvent(part, 30))
    accountant.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(2.0), 2))
    rounds = [RoundGroup(1000, 20, 30), RoundGroup(1000, 1000, 2)]
    found = sampled_epsilon(4.0, rounds, DELTA)
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)


def test_a_small_sample_has_a_smaller_epsilon() -> None:
    few, everybody = [RoundGroup(1000, 10, 10)], [RoundGroup(1000, 1000, 10)]
    assert sampled_epsilon(4.0, few, DELTA) < sampled_epsilon(4.0, everybody, DELTA)


def test_the_tighter_accountant_agrees_on_the_order() -> None:
    """Privacy loss distributions, which are nearly exact, lie a little below."""
    accountant = PLDAccountant()
    accountant.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(3.0), 10))
    tight = accountant.get_epsilon(DELTA)
    assert tight <= epsilon(3.0, 10, DELTA) <= 1.2 * tight


def test_epsilon_is_0_without_releases() -> None:
    assert epsilon(1.0, 0, DELTA) == 0.0


VALUES: dict[str, Any] = {
    "data": {"limit": 90},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 8, "per_round": 4},
    "model": {"hidden": [4]},
    "train": {"rounds": [2, 3], "max_steps": 1},
    "engine": {"kind": "serial"},
}
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 3.0}


def values(**changes: Any) -> dict[str, Any]:
    return {**VALUES, "privacy": NOISE, **changes}


def test_a_run_counts_the_most_uploads_of_one_client() -> None:
    experiment = build_experiment(parse(values()))
    state = experiment.initial_state()
    state.task = 2
    counted: Counter[int] = Counter()
    for task, rounds in ((0, 2), (1, 3)):
        for number in range(rounds):
            where = experiment.context(RunState(state.server, task=task, round=number))
            counted.update(sample_clients(experiment.config, experiment.task(task), where))
    assert Releases(experiment, state).most_uploads == max(counted.values())


def test_result_json_has_the_epsilon_of_dp_accounting() -> None:
    found = perdure.run(values()).values["privacy"]
    part = found["sums_of_one_client"]
    accountant = RdpAccountant()
    accountant.compose(dp.GaussianDpEvent(3.0), part)
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)
    assert (found["delta"], found["mode"], found["sums"]) == (DELTA, "central", 5)
    accountant = RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(8, 4, dp.GaussianDpEvent(1.5))
    accountant.compose(event, 5)
    assert found["epsilon_sampled"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)
    for words in ("not for single examples", "not against the server", "who was sampled"):
        assert words in found["claim"]


def test_local_noise_counts_half_since_an_upload_may_change_by_twice_the_norm() -> None:
    found = perdure.run(values(privacy={**NOISE, "mode": "local"})).values["privacy"]
    accountant = RdpAccountant()
    accountant.compose(dp.GaussianDpEvent(1.5), found["sums_of_one_client"])
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)
    assert found["epsilon_sampled"] is None
    assert "against the server too" in found["claim"]


def test_fields_that_are_clipped_apart_are_one_gaussian_mechanism() -> None:
    """Noise of L_f s sqrt(k) on each of k fields of norm L_f composes to a noise of s."""
    for noise, fields in ((1.0, 2), (4.0, 3)):
        clip_and_noise = ClipAndNoise(0.5, noise, None, {"f0": 30.0})
        names = [f"f{number}" for number in range(fields)]
        apart = RdpAccountant()
        for name in names:
            sigma = clip_and_noise.sigma(name, fields) / clip_and_noise.norm(name)
            apart.compose(dp.GaussianDpEvent(sigma), 7)
        together = apart.get_epsilon(DELTA)
        assert epsilon(noise, 7, DELTA) == pytest.approx(together, rel=1e-9)


def test_a_run_whose_uploads_have_two_fields_is_accounted_once_per_exchange() -> None:
    """FOT's sketches and fractions are one release; those of batch norm's statistics likewise."""
    found = perdure.run(values(method={"kind": "fot"}, clients={"count": 4})).values["privacy"]
    accountant = RdpAccountant()
    accountant.compose(dp.GaussianDpEvent(3.0), found["sums_of_one_client"])
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)
    assert "of each field" in found["claim"]


@pytest.mark.parametrize(("task_end", "more"), [(True, 1), (False, 0)])
def test_task_end_exchanges_count_if_they_are_covered(task_end: bool, more: int) -> None:
    clients = {"count": 4}
    privacy = {**NOISE, "task_end": task_end}
    settings = values(method={"kind": "fot"}, clients=clients, privacy=privacy)
    found = perdure.run(settings).values["privacy"]
    assert found["sums_of_one_client"] == 5 + 2 * more
    assert found["epsilon_sampled"] is None  # all clients take part, there is nothing to hide
    assert ("exchanges other than training" in found["claim"]) == (not task_end)


@dataclass(frozen=True)
class Exchanging(Method):
    """FedAvg with exchanges of every kind; one before training and two at the end send sums."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        take, work = self.take, self.work
        return [
            Exchange("alone", "none", aggregate=take),
            Exchange("open", client_work=work, aggregate=take),
            Train(),
            Exchange("note", client_work=self.note),
            Exchange("end", client_work=work, aggregate=take),
            Exchange("all so far", "ever", client_work=work, aggregate=take),
        ]

    def work(self, client: Client) -> ClientResult:
        return ClientResult({"n": Sum({"n": torch.ones(2)})})

    def note(self, client: Client) -> ClientResult:
        return ClientResult()

    def take(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        return server


def test_only_exchanges_that_send_something_count() -> None:
    """Of each task one before training and two at its end; the last takes in earlier clients."""
    method, clients = {"kind": f"{__name__}.Exchanging"}, {"count": 6}
    stream = {"kind": "permuted", "tasks": 2, "presence": 0.5}
    experiment = build_experiment(parse(values(method=method, clients=clients, stream=stream)))
    state = experiment.initial_state()
    first, second = (set(clients_with_data(experiment.task(task))) for task in (0, 1))
    assert first & second
    assert len(first) < len(first | second)
    state.round = 1
    assert Releases(experiment, state).most_uploads == 1 + 1
    state.round = 2
    assert Releases(experiment, state).most_uploads == 2 + 3
    state.task, state.round = 2, 0
    assert Releases(experiment, state).most_uploads == (2 + 3) + (3 + 3)
    found = privacy_summary(experiment, state)
    assert found is not None
    assert found["sums"] == (2 + 3) + (3 + 3)


def test_a_client_of_an_earlier_task_counts_when_it_participates_again() -> None:
    """Exchanges of all clients so far include clients without data of the task."""
    method, clients = {"kind": f"{__name__}.Exchanging"}, {"count": 6}
    stream = {"kind": "permuted", "tasks": 5, "presence": 0.2}
    experiment = build_experiment(parse(values(method=method, clients=clients, stream=stream)))
    state = replace(experiment.initial_state(), task=5)
    there = [set(clients_with_data(experiment.task(task))) for task in range(5)]
    rounds = [2, 3, 3, 3, 3]
    most = 0
    for client in range(6):
        here = [task for task in range(5) if client in there[task]]
        later = 5 - min(here) if here else 0
        most = max(most, sum(rounds[task] + 2 for task in here) + later)
    assert Releases(experiment, state).most_uploads == most


def test_epsilon_grows_from_task_to_task_in_the_events() -> None:
    privacy_spent: list[float] = []

    def watch(state: RunState, event: dict[str, Any]) -> None:
        if event["event"] == "task":
            privacy_spent.append(event["privacy"]["epsilon"])

    result = perdure.run(values(clients={"count": 4}), watch=watch)
    assert 0 < privacy_spent[0] < privacy_spent[1] == result.values["privacy"]["epsilon"]


def test_clipping_alone_gives_no_guarantee() -> None:
    found = perdure.run(values(privacy={"clip": 1.0})).values["privacy"]
    assert found["epsilon"] is None
    assert "nothing is claimed" in found["claim"]


def test_a_run_without_privacy_has_no_summary() -> None:
    experiment = build_experiment(parse(VALUES))
    assert privacy_summary(experiment, experiment.initial_state()) is None
    assert np.isfinite(epsilon(1.0, 1, 0.5))


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (3, "each over at least 3 of 3 sampled clients; the server"),
        (
            10,
            "each over at least 7 of 10 sampled clients (fewer, but at least 3, if fewer have data",
        ),
    ],
)
def test_a_secure_run_says_over_how_many_clients_its_sums_were(count: int, said: str) -> None:
    """At least the ceiling of 0.66 of the clients, and no sum is of fewer than three."""
    values = {"clients": {"count": count}, "privacy": {"secagg": True}}
    experiment = build_experiment(parse(values))
    summary = privacy_summary(experiment, experiment.initial_state())
    assert summary is not None
    assert said in summary["covers"]
