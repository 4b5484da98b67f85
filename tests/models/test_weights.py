"""Initial weights from files: loaded names, other names, and files that are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.models import ForwardPass, Outputs, make_network
from perdure.models.modules.resnet import Resnet20Model
from perdure.models.weights import load_weights

PRETRAINED = Path(os.environ.get("PERDURE_DATA", "")) / "weights/resnet20_cifar10.safetensors"
Pair = tuple[dict[str, Tensor], dict[str, Tensor]]


def start(kind: str = "resnet20", classes: int = 10, seed: int = 0, width: int = 4) -> Pair:
    outputs = Outputs("shared", classes, (tuple(range(classes)),))
    net = make_network(parse({"model": {"kind": kind, "width": width}}).model, (3, 32, 32), outputs)
    return net.init(torch.Generator().manual_seed(seed))


def write(folder: Path, values: dict[str, Tensor]) -> Path:
    path = folder / "weights.safetensors"
    save_file(values, path)
    return path


def test_weights_under_our_names_are_loaded(tmp_path: Path) -> None:
    params, buffers = start(seed=1)
    buffers = {n: b + 3 for n, b in buffers.items()}
    path = write(tmp_path, params | buffers)
    new_params, new_buffers, report = load_weights(path, *start(seed=2))
    assert all(torch.equal(new_params[n], params[n]) for n in params)
    assert all(torch.equal(new_buffers[n], buffers[n]) for n in buffers)
    assert set(report.loaded) == set(params) | set(buffers)
    assert not report.missing + report.unexpected + report.wrong_shape
    assert (
        report.summary()
        == f"{len(params) + len(buffers)} of {len(params) + len(buffers)} tensors loaded"
    )


@pytest.mark.parametrize("prefix", ["module.", "model.", "backbone.", "module.model."])
def test_prefixes_of_wrappers_are_removed(tmp_path: Path, prefix: str) -> None:
    params, buffers = start(seed=1)
    path = write(tmp_path, {prefix + n: v for n, v in (params | buffers).items()})
    new_params, _, report = load_weights(path, *start(seed=2))
    assert torch.equal(new_params["conv1.weight"], params["conv1.weight"])
    assert not report.missing + report.unexpected


@pytest.mark.parametrize("name", ["linear", "fc", "classifier"])
def test_a_classifier_is_loaded_into_the_head_if_it_fits(tmp_path: Path, name: str) -> None:
    params, _ = start(seed=1)
    path = write(tmp_path, {n.replace("head.", f"{name}."): v for n, v in params.items()})
    fits, _, report = load_weights(path, *start(seed=2))
    assert torch.equal(fits["head.weight"], params["head.weight"])
    assert "head.bias" in report.loaded
    other, other_buffers = start(seed=2, classes=7)
    kept, _, report = load_weights(path, other, other_buffers)
    assert torch.equal(kept["head.weight"], other["head.weight"])
    assert report.wrong_shape == ("head.weight", "head.bias")
    assert "another shape in the file: head.weight, head.bias" in report.summary()


def test_missing_and_unexpected_names_are_reported(tmp_path: Path) -> None:
    params, buffers = start(seed=1)
    values = {n: v for n, v in params.items() if n != "conv1.weight"}
    values |= {"extra.weight": torch.ones(2), "bn1.num_batches_tracked": torch.tensor(5)}
    ours, _ = start(seed=2)
    loaded, _, report = load_weights(write(tmp_path, values), ours, buffers)
    assert torch.equal(loaded["conv1.weight"], ours["conv1.weight"])
    assert report.unexpected == ("extra.weight",)
    assert set(report.missing) == {"conv1.weight", *buffers}
    summary = report.summary()
    assert "only in the file: extra.weight" in summary
    assert "not in the file: conv1.weight" in summary
    assert "more" in summary
    assert "\n" not in summary


def test_shortcuts_are_loaded_under_their_other_name(tmp_path: Path) -> None:
    params, buffers = start("resnet18", seed=1)
    renamed = {n.replace("downsample", "shortcut"): v for n, v in (params | buffers).items()}
    _, _, report = load_weights(write(tmp_path, renamed), *start("resnet18", seed=2))
    assert not report.missing + report.unexpected


def test_values_are_converted_to_the_precision_of_the_model(tmp_path: Path) -> None:
    params, buffers = start(seed=1)
    path = write(tmp_path, {n: v.half() for n, v in params.items()})
    loaded, _, _ = load_weights(path, params, buffers)
    assert {v.dtype for v in loaded.values()} == {torch.float32}


def test_bad_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    params, buffers = start()
    corrupt = tmp_path / "corrupt.safetensors"
    corrupt.write_bytes(b"not a safetensors file at all")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(write(tmp_path, params).read_bytes()[:-100])
    unrelated = write(tmp_path, {"nothing.of.ours": torch.ones(3)})
    for path in (tmp_path / "none.safetensors", tmp_path, corrupt, cut, unrelated):
        with pytest.raises(UserError, match=r"^model\.init: must be .*, got ") as caught:
            load_weights(path, params, buffers)
        assert path.name in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.skipif(not PRETRAINED.is_file(), reason="the pretrained weights are not here")
def test_all_tensors_of_a_pretrained_resnet20_are_loaded() -> None:
    params, buffers, report = load_weights(PRETRAINED, *start(width=16))
    assert not report.missing + report.unexpected + report.wrong_shape
    outputs = Outputs("shared", 10, (tuple(range(10)),))
    net = make_network(Resnet20Model(), (3, 32, 32), outputs)
    logits = net.logits(params, torch.zeros(2, 3, 32, 32), ForwardPass(buffers=buffers))
    assert bool(logits.isfinite().all())
