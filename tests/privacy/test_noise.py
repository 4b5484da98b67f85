"""Clipping and noise: bounds, deviations, where noise is added, and equal weights."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.config import parse
from perdure.contract.uploads import CollectedUploads, Each, StackedUploads, Sum
from perdure.core.errors import RunError, UserError
from perdure.core.rng import Rng
from perdure.privacy.noise import ClipAndNoise
from perdure.training.collector import UploadCollector
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task
from perdure.training.round import train_round


def context(**more: int) -> Any:
    where = {"task": 0, "round": 0, "exchange": 0, **more}
    return SimpleNamespace(rng=Rng(0), **where)


def uploads(rows: np.ndarray[Any, Any], weight: float | None = 5.0) -> StackedUploads:
    """Return uploads of two fields: the first three numbers per row, and the rest."""
    stack = torch.from_numpy(rows)
    fields = {"u": Sum({"a": stack[:, :3]}), "v": Sum({"b": stack[:, 3:].unsqueeze(1)}, weight)}
    clients = tuple(range(len(rows)))
    return StackedUploads(clients, tuple(float(c + 2) for c in clients), fields)


def whole(found: StackedUploads) -> np.ndarray[Any, Any]:
    parts = [t.flatten(1) for part in found.fields.values() for t in part.value.values()]
    return torch.cat(parts, 1).numpy()


def scaled_down(rows: np.ndarray[Any, Any], norm: float) -> np.ndarray[Any, Any]:
    factors: np.ndarray[Any, Any] = np.minimum(1, norm / np.linalg.norm(rows, axis=1))
    return rows * factors[:, None]


@settings(max_examples=40, deadline=None)
@given(clip=st.floats(1e-3, 50), scale=st.floats(1e-4, 1e3), seed=st.integers(0, 99))
def test_each_field_of_an_upload_is_scaled_down_to_its_norm(
    clip: float, scale: float, seed: int
) -> None:
    rows = np.random.default_rng(seed).normal(size=(4, 8))
    rows[:, :3] *= scale  # the first field does not change what is left of the second
    clip_and_noise = ClipAndNoise(clip, 0.0, None, {"v": 2.0})
    found = whole(clip_and_noise.on_clients(uploads(rows), context()))
    np.testing.assert_allclose(found[:, :3], scaled_down(rows[:, :3], clip), rtol=1e-9)
    np.testing.assert_allclose(found[:, 3:], scaled_down(rows[:, 3:], 2.0), rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    noise=st.floats(1e-2, 20),
    clip=st.floats(1e-3, 50),
    norm=st.floats(1e-3, 50),
    scale=st.floats(1e-4, 1e4),
    seed=st.integers(0, 99),
)
def test_an_upload_moves_all_sums_together_by_at_most_one_over_the_noise(
    noise: float, clip: float, norm: float, scale: float, seed: int
) -> None:
    """In units of each field's noise: that of one Gaussian mechanism, which is accounted."""
    rows = np.random.default_rng(seed).normal(size=(2, 8)) * scale
    clip_and_noise = ClipAndNoise(clip, noise, None, {"v": norm})
    sent = whole(clip_and_noise.on_clients(uploads(rows), context()))
    sigmas = np.repeat([clip_and_noise.sigma(name, 2) for name in ("u", "v")], (3, 5))
    assert (np.linalg.norm(sent / sigmas, axis=1) <= (1 + 1e-6) / noise).all()
    assert np.linalg.norm((sent[0] - sent[1]) / sigmas) <= 2 * (1 + 1e-6) / noise  # local


def test_the_bound_of_a_whole_upload_is_reached() -> None:
    """No smaller noise than that of each field would do."""
    clip_and_noise = ClipAndNoise(0.5, 3.0, None, {"v": 7.0})
    sent = whole(clip_and_noise.on_clients(uploads(np.full((1, 8), 1e6)), context()))[0]
    sigmas = np.repeat([clip_and_noise.sigma(name, 2) for name in ("u", "v")], (3, 5))
    assert np.linalg.norm(sent / sigmas) == pytest.approx(1 / 3.0)


def test_all_clients_have_equal_weights() -> None:
    found = ClipAndNoise(1.0, 0.0, None).on_clients(uploads(np.ones((3, 8))), context())
    assert found.weights == (1.0, 1.0, 1.0)
    assert all(isinstance(part, Sum) and part.weight == 1.0 for part in found.fields.values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_stay_so_after_clipping(bad: float) -> None:
    rows = np.ones((3, 8))
    rows[1, 4] = bad
    collector = UploadCollector()
    collector.add(ClipAndNoise(1.0, 0.0, None).on_clients(uploads(rows), context()))
    assert collector.rejected == [1]


def test_integers_become_floats_when_clipped() -> None:
    stack = StackedUploads((0,), (1.0,), {"n": Sum({"c": torch.tensor([[3, 4]])})})
    found = ClipAndNoise(1.0, 0.0, None).on_clients(stack, context())
    assert found.fields["n"].value["c"].tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]


@pytest.mark.parametrize(("parts", "each"), [(1, 6.0), (4, 3.0), (None, 0.0)])
def test_the_standard_deviation_of_a_clients_noise(parts: int | None, each: float) -> None:
    """Together noise * clip; of four clients each adds a fourth of the variance."""
    zeros = StackedUploads((0, 1, 2), (1.0,) * 3, {"u": Sum({"a": torch.zeros(3, 40_000)})})
    found = whole(ClipAndNoise(2.0, 3.0, parts).on_clients(zeros, context()))
    np.testing.assert_allclose(found.std(1), each, rtol=0.02)
    assert abs(np.corrcoef(found)[0, 1]) < 0.02 if each else not found.any()


def test_the_noise_of_two_fields_has_twice_the_variance_and_the_scale_of_each() -> None:
    stack = {"a": torch.zeros(2, 40_000)}
    zeros = StackedUploads((0, 1), (1.0, 1.0), {"u": Sum(stack), "v": Sum(stack)})
    clip_and_noise = ClipAndNoise(2.0, 3.0, 1, {"v": 0.1})
    found = clip_and_noise.on_clients(zeros, context())
    deviations = [float(found.fields[name].value["a"].std()) for name in ("u", "v")]
    expected = [3 * 2 * math.sqrt(2), 3 * 0.1 * math.sqrt(2)]
    assert deviations == pytest.approx(expected, rel=0.02)
    sums = CollectedUploads({"u": {"a": stack["a"][0]}, "v": {"a": stack["a"][0]}}, {}, {}, {0: 1})
    by_server = replace(clip_and_noise, noise_shares=None).on_server(sums, context())
    deviations = [float(by_server.total(name)["a"].std()) for name in ("u", "v")]
    assert deviations == pytest.approx(expected, rel=0.02)
    assert [by_server.noise[name] for name in ("u", "v")] == pytest.approx(expected)


@pytest.mark.parametrize(("parts", "times"), [(None, 1.0), (1, 5.0), (4, 5 / 4)])
def test_the_server_knows_the_noise_of_a_sum(parts: int | None, times: float) -> None:
    """Of five clients: once by the server, from each of them, or sized for four of them."""
    clip_and_noise, members = ClipAndNoise(2.0, 3.0, parts), dict.fromkeys(range(5), 1.0)
    zeros = StackedUploads(tuple(members), (1.0,) * 5, {"u": Sum({"a": torch.zeros(5, 40_000)})})
    total = {"a": clip_and_noise.on_clients(zeros, context()).fields["u"].value["a"].sum(0)}
    sums = CollectedUploads({"u": total}, {"u": 5.0}, {}, members)
    found = clip_and_noise.on_server(sums, context())
    assert found.noise["u"] == pytest.approx(6 * math.sqrt(times))
    assert float(found.total("u")["a"].std()) == pytest.approx(found.noise["u"], rel=0.02)


def test_the_server_adds_noise_where_clients_do_not() -> None:
    uploads = CollectedUploads({"u": {"a": torch.zeros(40_000)}}, {"u": 3.0}, {}, {0: 1.0})
    found = ClipAndNoise(2.0, 3.0, None).on_server(uploads, context()).total("u")["a"]
    assert float(found.std()) == pytest.approx(6.0, rel=0.02)
    for clip_and_noise in (ClipAndNoise(2.0, 3.0, 4), ClipAndNoise(2.0, 0.0, None)):
        assert not clip_and_noise.on_server(uploads, context()).total("u")["a"].any()


def test_noise_differs_by_client_round_task_and_exchange() -> None:
    clip_and_noise, zeros = ClipAndNoise(1.0, 1.0, 1), np.zeros((2, 8))
    found = [
        whole(clip_and_noise.on_clients(uploads(zeros), where))
        for where in (
            context(),
            context(round=1),
            context(task=1),
            context(exchange=1),
            context(exchange=-1),
        )
    ]
    rows = np.concatenate(found)
    assert len(np.unique(rows)) == rows.size
    np.testing.assert_array_equal(
        found[0], whole(clip_and_noise.on_clients(uploads(zeros), context()))
    )


def test_noise_does_not_depend_on_how_clients_are_stacked() -> None:
    clip_and_noise, rows = ClipAndNoise(1.0, 1.0, 1), np.random.default_rng(0).normal(size=(2, 8))
    together = clip_and_noise.on_clients(uploads(rows), context())
    first = StackedUploads((0,), (2.0,), uploads(rows[:1]).fields)
    np.testing.assert_array_equal(
        whole(together)[:1], whole(clip_and_noise.on_clients(first, context()))
    )


def test_a_per_client_field_cannot_be_clipped_unless_noise_is_local() -> None:
    shown = StackedUploads((0,), (1.0,), {"u": Each({"a": torch.ones(1, 2)})})
    for parts in (None, 4):
        with pytest.raises(RunError, match="the field 'u', which is not a Sum"):
            ClipAndNoise(1.0, 0.0, parts).on_clients(shown, context())


def test_a_per_client_field_has_all_its_noise_if_noise_is_local() -> None:
    shown = StackedUploads((0, 1), (3.0, 4.0), {"u": Each({"a": torch.full((2, 40_000), 9.0)})})
    found = ClipAndNoise(2.0, 3.0, 1).on_clients(shown, context())
    assert isinstance(found.fields["u"], Each)
    assert found.weights == (1.0, 1.0)
    values = found.fields["u"].value["a"]
    assert float(values.std()) == pytest.approx(6.0, rel=0.02)
    quiet = ClipAndNoise(2.0, 0.0, 1).on_clients(shown, context()).fields["u"].value["a"]
    assert quiet.double().norm(dim=1).tolist() == pytest.approx([2.0, 2.0])


VALUES: dict[str, Any] = {
    "data": {"limit": 90},
    "stream": {"kind": "permuted", "tasks": 1},
    "clients": {"count": 6, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"hidden": [20]},
    "train": {"rounds": 1, "batch_size": 16},
    "engine": {"kind": "serial"},
}


def moved(privacy: dict[str, Any]) -> torch.Tensor:
    """Return the change of the model in one round."""
    experiment: Experiment = build_experiment(parse({**VALUES, "privacy": privacy}))
    state = experiment.initial_state()
    before = state.server.params
    begin_task(experiment, state)
    train_round(experiment, state)
    return torch.cat([(state.server.params[n] - v).flatten() for n, v in before.items()])


@pytest.mark.parametrize(
    ("more", "variance"),
    [
        ({}, 1.0),
        ({"secagg": True}, 6 / 4),  # parts are sized for the 4 of 6 that the threshold asks for
        ({"mode": "local"}, 6.0),
        ({"mode": "local", "secagg": True}, 6.0),
    ],
    ids=["central", "central, secagg", "local", "local, secagg"],
)
def test_a_round_has_the_noise_of_its_mode(more: dict[str, Any], variance: float) -> None:
    clip, noise = 0.5, 20.0
    quiet = moved({"clip": clip, "secagg": more.get("secagg", False)})
    noisy = moved({"clip": clip, "noise": noise, **more})
    spread = float((noisy - quiet).std())  # of the mean over 6 clients
    assert spread == pytest.approx(clip * noise * math.sqrt(variance) / 6, rel=0.05)


def test_the_mean_of_clipped_updates_is_within_the_clipping_norm() -> None:
    assert float(moved({"clip": 0.01}).norm()) <= 0.01 * (1 + 1e-5)
    assert float(moved({}).norm()) > 0.02


def test_weights_by_samples_are_refused_with_clipping() -> None:
    values = {**VALUES, "train": {**VALUES["train"], "weighting": "samples"}}
    with pytest.raises(
        UserError, match=r"must be uniform, since there is privacy\.clip, got 'samples'"
    ):
        build_experiment(parse({**values, "privacy": {"clip": 1.0}}))


def test_noise_without_clipping_is_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"^privacy\.clip: must be a number, since privacy\.noise is given, got None",
    ):
        parse({"privacy": {"noise": 1.0}})
