"""Local noise on updates that the server sees one by one, and what remains refused."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting as dp
import pytest
import torch
from dp_accounting.rdp import RdpAccountant

import perdure
from perdure.config import parse
from perdure.contract import CollectedUploads, Each, Server
from perdure.contract.uploads import StackedUploads
from perdure.core.errors import UserError
from perdure.methods.registry import METHODS
from perdure.privacy.mechanism import Place
from perdure.privacy.noise import ClipAndNoise
from perdure.training.experiment import build_experiment
from perdure.training.loop import begin_task, run_stream
from perdure.training.round import TrainingRound, train_round

VALUES: dict[str, Any] = {
    "data": {"limit": 120},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 5, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [8]},
    "train": {"rounds": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
}
LOCAL: dict[str, Any] = {"clip": 0.5, "noise": 4.0, "mode": "local"}
ALIGNING = [{"kind": "stamp"}, {"kind": "fedomg"}, {"kind": "stamp", "diagnostics": True}]


def seen(method: dict[str, Any], privacy: dict[str, Any]) -> CollectedUploads:
    """Return what the server sees in the first round."""
    experiment = build_experiment(parse({**VALUES, "method": method, "privacy": privacy}))
    state = experiment.initial_state()
    begin_task(experiment, state)
    collected: list[CollectedUploads] = []
    server_after = TrainingRound.server_after

    def noted(self: TrainingRound, uploads: CollectedUploads) -> Server:
        collected.append(uploads)
        return server_after(self, uploads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRound, "server_after", noted)
        train_round(experiment, state)
    return collected[0]


def updates(uploads: CollectedUploads) -> torch.Tensor:
    values = uploads.per_client["update"].values()
    return torch.stack([torch.cat([t.flatten() for t in update.values()]) for update in values])


@pytest.mark.parametrize("method", ALIGNING, ids=str)
def test_the_server_sees_each_update_clipped_and_with_all_its_noise(method: dict[str, Any]) -> None:
    quiet, noisy = seen(method, {"clip": 0.5, "mode": "local"}), seen(method, LOCAL)
    assert (updates(quiet).double().norm(dim=1) <= 0.5 * (1 + 1e-5)).all()
    fields = len(noisy.sums) + len(noisy.per_client)
    spread = (updates(noisy) - updates(quiet)).std(dim=1)
    assert spread.tolist() == pytest.approx([4.0 * 0.5 * math.sqrt(fields)] * 5, rel=0.15)
    assert set(noisy.client_weights.values()) == {1.0}


@pytest.mark.parametrize("method", ALIGNING, ids=str)
def test_a_run_with_local_noise_has_the_epsilon_of_dp_accounting(method: dict[str, Any]) -> None:
    config = {**VALUES, "method": method, "privacy": LOCAL}
    found = perdure.run(config).values["privacy"]
    assert found["sums_of_one_client"] == 4
    accountant = RdpAccountant()
    accountant.compose(dp.GaussianDpEvent(4.0 / 2), 4)  # uploads may differ by twice the norm
    assert found["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    for words in ("any change of everything that one client sent", "against the server too"):
        assert words in found["claim"]


@pytest.mark.parametrize("method", ALIGNING[:2], ids=str)
def test_updates_stay_refused_where_the_server_would_see_them(method: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^privacy.clip: must be None, .*\(privacy.mode local can"):
        build_experiment(parse({**VALUES, "method": method, "privacy": {"clip": 0.5}}))
    secure = {**LOCAL, "secagg": True}
    with pytest.raises(UserError, match=r"^privacy.secagg: must be False, since method"):
        build_experiment(parse({**VALUES, "method": method, "privacy": secure}))


@pytest.mark.parametrize(
    "method", [{"kind": "fedprotip", "bases": "union"}, {"kind": "fedprotip"}], ids=str
)
def test_fields_whose_shapes_depend_on_data_stay_refused(method: dict[str, Any]) -> None:
    """The rank of a client's basis is a number that no noise is added to."""
    with pytest.raises(UserError, match=r"^privacy.clip: .*, whose shapes noise does not hide"):
        build_experiment(parse({**VALUES, "method": method, "privacy": LOCAL}))


def test_local_noise_does_not_excuse_a_field_that_was_not_declared() -> None:
    experiment = build_experiment(parse({**VALUES, "privacy": {"clip": 0.5}}))
    state = experiment.initial_state()
    begin_task(experiment, state)
    shown = StackedUploads((0,), (1.0,), {"peek": Each({"n": torch.ones(1, 1)})})
    with pytest.raises(perdure.RunError, match="'peek'"):
        experiment.privacy.on_clients(shown, Place(experiment.context(state), 5))


NOT_CLIPPED = {"fednova", "fedprotip", "pip", "fed-l2p", "fed-dualp"}
"""Refused with clipping at their defaults, or on transformers alone."""


@pytest.mark.parametrize("kind", sorted(set(METHODS.names()) - NOT_CLIPPED))
def test_the_fields_of_an_upload_do_not_depend_on_a_clients_data(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number is in the noise, and nothing hides it."""
    sent: dict[tuple[int, int, int], set[tuple[str, ...]]] = {}
    protect = ClipAndNoise.on_clients

    def record(self: ClipAndNoise, uploads: StackedUploads, context: Any) -> StackedUploads:
        where = (context.task, context.round, context.exchange)
        sent.setdefault(where, set()).add(tuple(uploads.fields))
        return protect(self, uploads, context)

    monkeypatch.setattr(ClipAndNoise, "on_clients", record)
    config = {**VALUES, "method": {"kind": kind}, "privacy": {"clip": 1.0, "mode": "local"}}
    experiment = build_experiment(parse(config))
    run_stream(experiment, experiment.initial_state(), lambda *_: None)
    assert len(sent) >= 2
    assert all(len(fields) == 1 for fields in sent.values())


def test_fednova_cannot_be_clipped() -> None:
    config = {**VALUES, "method": {"kind": "fednova"}, "privacy": {"clip": 0.5}}
    with pytest.raises(UserError, match=r"^privacy.clip: must be null with fednova, .*, got 0.5"):
        build_experiment(parse(config))
