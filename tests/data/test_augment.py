"""Augmentation: crops and flips by hand, in both engines, in local steps alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import perdure
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.data.examples import Examples
from perdure.data.images import Augmentation, CropAugment, FlipAugment
from perdure.data.normalization import make_normalization
from perdure.data.sources.arrays import DigitsData
from perdure.models.ops import ForwardPass
from perdure.training.experiment import build_experiment
from perdure.training.local_training import batch_schedule
from perdure.training.loop import run_stream

VALUES: dict[str, Any] = {
    "seed": 5,
    "data": {"source": "digits", "limit": 60, "test_limit": 40},
    "stream": {"kind": "split", "tasks": 1},
    "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "conv", "width": 4},
    "train": {"rounds": 1, "batch_size": 8, "max_steps": 2, "lr": 0.1},
    "engine": {"kind": "serial"},
}
CHANGES = [{"kind": "crop", "padding": 2}, "flip"]


def with_changes(changes: list[Any] = CHANGES, **sections: Any) -> dict[str, Any]:
    values = {key: {**VALUES[key], **section} for key, section in sections.items()}
    return VALUES | values | {"data": VALUES["data"] | {"augment": changes}}


def by_hand(images: np.ndarray, draws: np.ndarray, padding: int, probability: float) -> np.ndarray:
    """A crop and then a flip of uint8 images [N, C, H, W], one after another, in NumPy."""
    out = np.empty_like(images)
    for n, (image, (top, left, mirror)) in enumerate(zip(images, draws, strict=True)):
        wide = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        y, x = int(top * (2 * padding + 1)), int(left * (2 * padding + 1))
        window = wide[:, y : y + image.shape[1], x : x + image.shape[2]]
        out[n] = window[:, :, ::-1] if mirror < probability else window
    return out


@pytest.mark.parametrize("channels", [1, 3])
def test_crops_and_flips_are_those_of_the_pixels_before_normalization(channels: int) -> None:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (40, channels, 5, 7), dtype=np.uint8)
    draws = rng.random((40, 3)).astype(np.float32)
    config = DigitsData(mean=[0.3, 0.4, 0.5][:channels], std=[0.2, 0.5, 0.9][:channels])
    pixels, changed = torch.from_numpy(images), torch.from_numpy(by_hand(images, draws, 2, 0.5))
    plain, expected = (
        Examples(x, torch.zeros(40), normalization=make_normalization(x, config))
        for x in (pixels, changed)
    )
    augmentation = Augmentation((CropAugment(padding=2), FlipAugment()))
    rows = torch.arange(40)
    found = augmentation.apply(plain.gather(rows), torch.from_numpy(draws), plain.black)
    torch.testing.assert_close(found, expected.gather(rows))
    stacked = augmentation.apply(
        plain.gather(rows.view(4, 10)), torch.from_numpy(draws).view(4, 10, 3), plain.black
    )
    assert torch.equal(stacked.flatten(0, 1), found)


def test_flips_are_as_frequent_as_asked() -> None:
    x = torch.arange(8.0).view(1, 1, 2, 4).expand(4000, 1, 2, 4)
    draws = torch.rand(4000, 1, generator=torch.Generator().manual_seed(0))
    flipped = Augmentation((FlipAugment(probability=0.2),)).apply(x, draws, torch.zeros(1))
    fraction = (flipped[:, 0, 0, 0] == 3).float().mean().item()
    assert fraction == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("engine", ["serial", "vector"])
def test_the_loss_of_a_step_is_that_of_changed_images(engine: str) -> None:
    one = {"clients": {"count": 1}, "engine": {"kind": engine}, "train": {"max_steps": 1}}
    values = with_changes(**one)
    experiment = build_experiment(parse(values))
    state, events = experiment.initial_state(), []
    context = experiment.context(state)
    client = experiment.client(0, context, state.server, {"params": state.server.params})
    params = experiment.grow(state.server.params, 0)
    rows = next(iter(batch_schedule(client, experiment.config.train)))
    draws = torch.rand(1, 8, 3, generator=experiment.rng.torch_generator("augment", 0, 0, 0))
    examples = experiment.task(0).train
    scale, shift = examples.normalization.scale, examples.normalization.shift
    images = examples.x[rows].view(-1, *examples.shape).numpy()
    changed = torch.from_numpy(by_hand(images, draws[0].numpy(), 2, 0.5)).float()
    x = changed * float(scale[0]) + float(shift[0])
    expected = F.cross_entropy(
        experiment.network_at(0).logits(params, x, ForwardPass()), client.data.targets[rows]
    )
    run_stream(experiment, state, lambda _, event: events.append(event))
    assert events[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_engines_agree() -> None:
    models = []
    for kind in ("serial", "vector"):
        experiment = build_experiment(parse(with_changes(engine={"kind": kind})))
        models.append(
            run_stream(experiment, experiment.initial_state(), lambda *_: None).server.params
        )
    for name, value in models[0].items():
        torch.testing.assert_close(models[1][name], value, rtol=1e-4, atol=1e-5)


def test_images_change_in_every_round_and_only_in_training() -> None:
    plain, changed = (perdure.run(values).values for values in (VALUES, with_changes()))
    assert plain["model_sha256"] != changed["model_sha256"]
    closed = {"kind": "fedncm"}  # trains nothing: its statistics are those of unchanged images
    plain, changed = (
        perdure.run(values | {"method": closed}).values for values in (VALUES, with_changes())
    )
    assert plain["model_sha256"] == changed["model_sha256"]
    assert plain["matrix"] == changed["matrix"]


def test_what_cannot_be_changed_is_refused(tmp_path: Any) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("a,b,label\n" + "".join(f"{i},{i % 3},{'xy'[i % 2]}\n" for i in range(20)))
    data = {"source": "table", "path": str(table), "augment": ["flip"]}
    with pytest.raises(UserError, match=r"data\.augment: must be empty for inputs that are not im"):
        build_experiment(parse({"data": data}))
    with pytest.raises(UserError, match=r"data\.augment: must be empty with stream\.kind permuted"):
        build_experiment(parse(with_changes() | {"stream": {"kind": "permuted"}}))
    for wrong, words in (
        (["turn"], "kind: must be crop, flip, or a dotted path to a class, got 'turn'"),
        ([{"kind": "crop", "padding": 0}], "padding"),
        ([{"kind": "flip", "probability": 2}], "probability"),
        ([{"kind": "flip", "padding": 2}], "unknown key"),
    ):
        with pytest.raises(UserError, match=r"data\.augment") as caught:
            parse({"data": {"source": "digits", "augment": wrong}})
        assert words in str(caught.value)
    domains = [{"source": "digits", "augment": ["flip"]}]
    with pytest.raises(UserError, match=r"augment: must be empty, since data\.augment"):
        parse({"stream": {"kind": "domains", "domains": domains}})
