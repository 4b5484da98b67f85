"""Backbones as bodies: shapes, stacking, tracing, partial training, and the methods on top."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import interpolate

from backbone_files import write_bert, write_vit
from perdure.config import Config, parse
from perdure.core.trees import Tensors
from perdure.models.layers import BodySetup
from perdure.models.ops import ForwardPass
from perdure.models.text_encoder import TextEncoder, TextModel
from perdure.models.transformer import attention, fused_attention
from perdure.models.vit import Vit, VitModel, cut_patches, resize_images
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task, end_task, evaluate
from perdure.training.round import train_round
from perdure.training.state import RunState

Body = Vit | TextEncoder


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def words(rows: int, length: int) -> Tensor:
    """Rows of unequal length: token 0 fills them up."""
    computed = torch.randint(1, 14, (rows, length), generator=torch.Generator().manual_seed(1))
    return computed * (torch.arange(length) < torch.arange(1, rows + 1)[:, None] % length + 1)


@pytest.fixture(params=["vit", "text"])
def body_and_input(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Body, Tensor]:
    if request.param == "vit":
        config = VitModel(init=str(write_vit(tmp_path / "vit")))
        return config.make_body((1, 8, 8), 0, BodySetup()), drawn(6, 1, 8, 8)
    config = TextModel(init=str(write_bert(tmp_path / "bert")))
    return config.make_body((7,), 0, BodySetup()), words(6, 7)


def test_patches_equal_those_of_a_convolution() -> None:
    images, weight = drawn(2, 3, 12, 12), drawn(5, 3, 4, 4, seed=1)
    expected = torch.conv2d(images, weight, stride=4).flatten(2).transpose(1, 2)
    computed = cut_patches(images, 4) @ weight.flatten(1).t()
    torch.testing.assert_close(computed, expected)


@pytest.mark.parametrize(("height", "width", "size"), [(8, 8, 28), (40, 30, 28), (28, 8, 14)])
def test_resizing_is_bilinear(height: int, width: int, size: int) -> None:
    images = drawn(2, 3, height, width)
    expected = interpolate(images, (size, width), mode="bilinear", antialias=size < height)
    expected = interpolate(expected, (size, size), mode="bilinear", antialias=size < width)
    torch.testing.assert_close(resize_images(images, size), expected, atol=1e-5, rtol=1e-5)


def test_images_of_any_size_and_color_are_accepted() -> None:
    gray = VitModel(init="random", patch=4).make_body((1, 8, 8), 0, BodySetup())
    color = replace(gray, channels=3)
    image = drawn(2, 1, 8, 8)
    same = image.expand(-1, 3, -1, -1)
    params = gray.frozen()
    torch.testing.assert_close(
        gray.features(params, same, ForwardPass()), gray.features(params, image, ForwardPass())
    )
    params = color.frozen()
    torch.testing.assert_close(
        color.features(params, same, ForwardPass()), color.features(params, image, ForwardPass())
    )
    assert color.features(params, drawn(2, 3, 20, 31), ForwardPass()).shape == (2, 128)


def test_written_out_attention_equals_the_fused_one() -> None:
    query, keys, values = drawn(3, 2, 4, 5), drawn(3, 2, 6, 5, seed=1), drawn(3, 2, 6, 5, seed=2)
    padding = torch.arange(6) >= torch.tensor([6, 3, 1])[:, None]
    for mask in (None, padding):
        torch.testing.assert_close(
            attention(query, keys, values, mask), fused_attention(query, keys, values, mask)
        )


def test_padding_does_not_change_the_features(tmp_path: Path) -> None:
    body = TextModel(init=str(write_bert(tmp_path))).make_body((9,), 0, BodySetup())
    short = torch.tensor([[2, 5, 6, 3]])
    long = torch.tensor([[2, 5, 6, 3, 0, 0, 0]])
    params = body.frozen()
    torch.testing.assert_close(
        body.features(params, long, ForwardPass()), body.features(params, short, ForwardPass())
    )


def prefix_loss(body: Body, frozen: Tensors, x: Tensor, prefix: Tensor, stacked: bool) -> Tensor:
    """A loss of prefixes in two blocks and of tokens at the input, on a frozen backbone."""
    fwd, padding = ForwardPass(stacked=stacked), body.padding(x)
    each = prefix.expand(len(x), *prefix.shape)
    tokens = torch.cat([body.embed(frozen, x, fwd), each[..., :16]], dim=1)
    if padding is not None:
        padding = torch.nn.functional.pad(padding, (0, prefix.shape[0]))
    hidden = body.encoder(frozen, tokens, fwd, {0: each, 2: each}, padding)
    return body.pool(hidden, padding).square().sum()


def test_stacked_clients_share_a_frozen_backbone(body_and_input: tuple[Body, Tensor]) -> None:
    body, x = body_and_input
    # in double precision, so that only a mistake can make a difference
    frozen = {name: value.double() for name, value in body.frozen().items()}
    x = x.double() if x.is_floating_point() else x
    prefixes, inputs = drawn(3, 4, 32).double() - 0.5, x.reshape(3, 2, *x.shape[1:])

    def step(stack: Tensor, rows: Tensor) -> Tensor:
        leaf = stack.detach().requires_grad_()
        loss = torch.vmap(lambda p, r: prefix_loss(body, frozen, r, p, True))(leaf, rows)
        return torch.autograd.grad(loss.sum(), leaf)[0]

    expected = []
    for prefix, rows in zip(prefixes, inputs, strict=True):
        leaf = prefix.clone().requires_grad_()
        loss = prefix_loss(body, frozen, rows, leaf, False)
        expected.append(torch.autograd.grad(loss, leaf)[0])
    torch.testing.assert_close(step(prefixes, inputs), torch.stack(expected))
    traced = make_fx(step)(prefixes, inputs)
    torch.testing.assert_close(traced(prefixes * 2, inputs), step(prefixes * 2, inputs))


def test_weights_are_read_once_and_copied_for_training(body_and_input: tuple[Body, Tensor]) -> None:
    body, _ = body_and_input
    first, _ = body.init(torch.Generator())
    first["block0.qkv.weight"].zero_()
    second, _ = body.init(torch.Generator())
    assert second["block0.qkv.weight"].abs().sum() > 0
    assert body.frozen() is body.frozen()


def test_only_the_trained_blocks_are_parameters(body_and_input: tuple[Body, Tensor]) -> None:
    whole, x = body_and_input
    for blocks in (0, 1, 3):
        part = replace(whole, backbone_init=replace(whole.backbone_init, trained_blocks=blocks))
        params, _ = part.init(torch.Generator())
        names = {name.split(".")[0] for name in params}
        kept = {f"block{n}" for n in range(3 - blocks, 3)}
        assert names == kept | ({"norm"} if blocks and isinstance(whole, Vit) else set())
        assert {layer.name for layer in part.layers} <= set(params)
        torch.testing.assert_close(
            part.features(params, x, ForwardPass()),
            whole.features(whole.frozen(), x, ForwardPass()),
        )


def small(method: dict[str, Any], engine: str = "serial", steps: int = 2, **model: Any) -> Config:
    return parse(
        {
            "data": {"limit": 80},
            "stream": {"kind": "split", "tasks": 2},
            "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
            "model": {
                "kind": "vit",
                "init": "random",
                "width": 16,
                "heads": 2,
                "patch": 4,
                **model,
            },
            "method": method,
            "train": {"rounds": 2, "batch_size": 8, "lr": 0.05, "max_steps": steps},
            "engine": {"kind": engine},
        }
    )


def trained(config: Config) -> tuple[Experiment, RunState]:
    """A run after its first task and one round of its second."""
    experiment = build_experiment(config)
    state = experiment.initial_state()
    begin_task(experiment, state)
    for _ in range(2):
        train_round(experiment, state)
    end_task(experiment, state)
    evaluate(experiment, state)
    state.task, state.round = 1, 0
    begin_task(experiment, state)
    train_round(experiment, state)
    return experiment, state


@pytest.mark.parametrize(("kind", "steps"), [("fot", 4), ("fedprotip", 1)])  # traced, and not
def test_methods_train_a_vit_equally_on_both_engines(kind: str, steps: int) -> None:
    _, serial = trained(small({"kind": kind}, "serial", steps, depth=1))
    experiment, vector = trained(small({"kind": kind}, "vector", steps, depth=1))
    assert experiment.engine.name == "vector"
    assert not experiment.engine.choice()["serial"]
    for name, value in serial.server.params.items():
        torch.testing.assert_close(vector.server.params[name], value, atol=2e-4, rtol=1e-3)


def test_frozen_blocks_are_not_sent() -> None:
    experiment, state = trained(small({"kind": "fedavg"}, depth=3, train_layers=1, head="shared"))
    assert {name.split(".")[0] for name in state.server.params} == {"block2", "norm", "head"}
    start = experiment.initial_state().server.params
    assert all(not torch.equal(start[name], value) for name, value in state.server.params.items())


def test_inputs_of_a_vit_are_from_0_to_1_unless_normalization_is_configured() -> None:
    plain = build_experiment(small({"kind": "fedavg"}, depth=1))
    rows = plain.task(0).train.gather(torch.arange(20))
    assert rows.min() == 0
    assert rows.max() == 1
    normalized = small({"kind": "fedavg"}, depth=1)
    normalized = normalized.model_copy(
        update={"data": normalized.data.model_copy(update={"normalize": True})}
    )
    assert build_experiment(normalized).task(0).train.gather(torch.arange(20)).min() < 0
