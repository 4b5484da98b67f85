"""Sketches that are clipped or noisy: what is protected is signal, and a run says if nothing is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from subspace_runs import SMALL, experiment_of, train_task

import perdure
from perdure.algebra.sketches import sketch_spectrum
from perdure.algebra.subspaces import Subspace
from perdure.contract import CollectedUploads
from perdure.contract.exchanges import split_exchanges
from perdure.methods.fot import FOT
from perdure.methods.parts.client_bases import LARGEST_MOMENT, SummedBases
from perdure.methods.parts.protected_layers import FEATURES
from perdure.methods.parts.routing import summed_directions
from perdure.models.layers import Layer
from perdure.training.loop import begin_task

UNIFORM: dict[str, Any] = {"train": SMALL["train"] | {"weighting": "uniform"}}


def ranks(method: dict[str, Any], **sections: Any) -> dict[str, int]:
    """Return the rank of each layer's protected subspace after the first task."""
    experiment = experiment_of({"kind": "fot", **method}, **UNIFORM, **sections)
    state = experiment.initial_state()
    train_task(experiment, state)
    spaces = state.server.state.spaces
    return {name: Subspace.from_tree(space).rank for name, space in spaces.items()}


@pytest.mark.parametrize("rule", ["paper", "energy"])
@pytest.mark.parametrize("clip", [0.05, 1.0])
def test_clipping_does_not_change_how_much_fot_protects(rule: str, clip: float) -> None:
    """Clipped together with the much longer sketches, fractions became 0: nothing was uncovered."""
    method = {"rank_rule": rule}
    plain, clipped = ranks(method), ranks(method, privacy={"clip": clip})
    assert set(plain) == set(clipped) == {"fc1.weight", "fc2.weight", "head.weight"}
    for name, rank in plain.items():
        assert abs(clipped[name] - rank) <= max(2, 0.2 * rank)


def test_fractions_are_within_the_norm_that_fot_declares() -> None:
    """One in [0, 1] per layer, so that clipping changes none of them."""
    experiment = experiment_of({"kind": "fot"})
    state = experiment.initial_state()
    begin_task(experiment, state)
    exchange = split_exchanges(FOT().exchanges(experiment.context(state))).ending[0]
    assert exchange.clip_norms == {"shares": pytest.approx(3**0.5)}
    energy = FOT(rank_rule="energy").exchanges(experiment.context(state))
    assert split_exchanges(energy).ending[0].clip_norms == {}


def test_a_combination_keeps_the_declared_norm_under_the_name_of_its_part() -> None:
    experiment = experiment_of({"kind": "fot", "with": [{"kind": "fedprox"}]})
    state = experiment.initial_state()
    begin_task(experiment, state)
    (gpse,) = experiment.exchanges(state).ending
    assert gpse.clip_norms == {"fot.shares": pytest.approx(3**0.5)}


def test_a_little_noise_leaves_fot_its_subspaces() -> None:
    found = ranks({}, privacy={"clip": 1.0, "noise": 1e-4})
    plain = ranks({}, privacy={"clip": 1.0})
    assert set(found) == set(plain)
    assert all(0 < found[name] <= plain[name] + 2 for name in plain)


DROWNING = [
    ({"sketch_noise": "standard"}, {}, "method.sketch_noise"),
    ({"sketch_noise": "paper"}, {}, "method.sketch_noise"),
    ({}, {"clip": 1.0, "noise": 0.5}, "privacy.noise"),
    ({}, {"clip": 1.0, "noise": 0.5, "mode": "local"}, "privacy.noise"),
    ({}, {"clip": 1.0, "noise": 0.5, "secagg": True}, "privacy.noise"),
]


@pytest.mark.parametrize(("method", "privacy", "key"), DROWNING, ids=str)
def test_noise_that_drowns_the_signal_is_not_protected_and_said_once(
    method: dict[str, Any], privacy: dict[str, Any], key: str
) -> None:
    """Appendix H at its defaults protected directions of noise until no layer could learn."""
    config = {**SMALL, **UNIFORM, "method": {"kind": "fot", **method}, "privacy": privacy}
    events: list[dict[str, Any]] = []
    found = perdure.run(config, watch=lambda _, event: events.append(event)).values["warnings"]
    (text,) = [w["text"] for w in found if w["key"] == "sketch noise"]
    assert text.startswith(f"{key}: the noise drowns the signal in layers fc1.weight, fc2.weight")
    assert "; nothing is protected" in text
    assert not [w for w in found if w["key"].startswith("space of")]
    used = [event["method"]["used"] for event in events if event["event"] == "task"]
    assert all(fraction == 0 for each in used for fraction in each.values())


def test_more_epsilon_lets_directions_through() -> None:
    few, many = (ranks({"sketch_noise": "standard", "epsilon": e}) for e in (40.0, 1e5))
    assert sum(few.values()) < sum(many.values())
    assert set(many) == {"fc1.weight", "fc2.weight", "head.weight"}


def noisy(sigma: float, directions: int = 3, size: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a signal of few directions, and the same with noise."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(size, directions, generator=generator)).Q
    signal = 100 * basis @ torch.randn(directions, size, generator=generator)
    return basis, signal + sigma * torch.randn(size, size, generator=generator)


def test_the_spectrum_of_a_noisy_sketch_has_the_directions_of_the_signal() -> None:
    basis, sketch = noisy(sigma=1.0)
    spectrum = sketch_spectrum(sketch, 1.0)
    assert spectrum.rank == 3
    found = spectrum.directions[:, :3].float()
    assert float((basis - found @ (found.T @ basis)).norm()) < 0.2
    assert sketch_spectrum(sketch).rank == 40  # all of them, if nothing is known of noise


def test_noise_inside_the_protected_space_is_left_out() -> None:
    _, sketch = noisy(sigma=1.0)
    protected = Subspace.from_tree({"basis": torch.eye(40)[:, :30]})
    spectrum = sketch_spectrum(sketch, 1.0, protected)
    assert spectrum.rank == 3
    assert float(spectrum.directions[:30, :3].abs().max()) < 1e-5
    everything = Subspace.from_tree({"basis": torch.eye(40)})
    assert sketch_spectrum(sketch, 1.0, everything).rank == 0


def test_summed_bases_of_fedprotip_are_cut_at_the_noise() -> None:
    _, sketch = noisy(sigma=1.0)
    uploads = CollectedUploads({"bases": {FEATURES: sketch}}, {"bases": 4.0})
    assert summed_directions(uploads, 20).shape[1] == 20
    uploads.noise = {"bases": 1.0}
    assert summed_directions(uploads, 20).shape[1] == 3


@pytest.mark.parametrize("kind", ["sketch", "moment"])
def test_summed_directions_of_fedprotip_are_cut_at_the_noise(kind: str) -> None:
    basis, sketch = noisy(sigma=1.0)
    matrix = sketch if kind == "sketch" else basis @ basis.T * 1e3 + (sketch - noisy(0.0)[1])
    energies = torch.tensor([3e3, 3e3])
    sums = {"directions": {f"a/{kind}": matrix, "a/energies": energies}}
    uploads = CollectedUploads(sums, {"directions": 4.0})
    layer, bases = Layer("a", "linear", 40, 0, bias=False), SummedBases(40, LARGEST_MOMENT)
    assert bases.directions(uploads, layer, 0.9999).shape[1] > 3
    uploads.noise = {"directions": 1.0}
    assert bases.directions(uploads, layer, 0.9999).shape[1] == 3
