"""Whole bodies against torch.nn modules: outputs, gradients, geometry and initial values."""

from __future__ import annotations

import itertools
import math

import pytest
import reference_nets as reference
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.models import ForwardPass, Network, Outputs, make_network, ops
from perdure.models.adapter.module_body import ModuleBody

OUTPUTS = Outputs("shared", 10, (tuple(range(10)),))


def network(shape: tuple[int, ...], **config: object) -> Network:
    return make_network(parse({"model": config}).model, shape, OUTPUTS)


CASES: dict[str, tuple[dict[str, object], tuple[int, int, int], nn.Module]] = {
    "mlp": ({"kind": "mlp", "hidden": [20, 12]}, (1, 8, 8), reference.Mlp([64, 20, 12])),
    "conv": ({"kind": "conv", "width": 4}, (1, 28, 28), reference.Small(1, 28, 4)),
    "conv-tiny": ({"kind": "conv", "width": 4}, (3, 8, 8), reference.Small(3, 8, 4)),
    "alexnet": (
        {"kind": "alexnet", "width": 4, "norm": "batch", "bias": False},
        (3, 32, 32),
        reference.AlexNet(4),
    ),
    "resnet18-reduced": (
        {"kind": "resnet18-reduced", "width": 4},
        (3, 32, 32),
        reference.Residual(4, [2, 2, 2, 2], pool=2),
    ),
    "resnet18": (
        {"kind": "resnet18", "width": 4},
        (3, 32, 32),
        reference.Residual(4, [2, 2, 2, 2]),
    ),
    "resnet18-large": (
        {"kind": "resnet18", "width": 4},
        (3, 96, 96),
        reference.Residual(4, [2, 2, 2, 2], large=True),
    ),
    "resnet20": (
        {"kind": "resnet20", "width": 4},
        (3, 32, 32),
        reference.Residual(4, [3, 3, 3], pad=True),
    ),
    "resnet32": (
        {"kind": "resnet32", "width": 4},
        (3, 16, 16),
        reference.Residual(4, [5, 5, 5], pad=True),
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_body_computes_what_its_torch_module_computes(name: str, training: bool) -> None:
    config, shape, module = CASES[name]
    net = network(shape, **config)
    own, buffers = net.init(torch.Generator().manual_seed(0))
    module = module.double().train(training)
    theirs = dict(module.named_parameters())
    params = {n: p.double() for n, p in own.items() if not n.startswith("head.")}
    assert set(params) == set(theirs)
    with torch.no_grad():
        for n, p in theirs.items():
            p.copy_(params[n])
    statistics = {n: b for n, b in module.named_buffers() if "tracked" not in n}
    assert set(buffers) == set(statistics)
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = {n: p.requires_grad_() for n, p in params.items()}
    before = {n: b.clone() for n, b in statistics.items()}
    fwd = ForwardPass(train=training, batch_statistics=training, buffers=before)
    out, expected = net.features(leaves, x, fwd), module(x)
    assert out.shape == (6, net.feature_size)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn(out.shape, dtype=torch.float64)
    ours = torch.autograd.grad(out, [leaves[n] for n in theirs], upstream)
    other = torch.autograd.grad(expected, list(theirs.values()), upstream)
    torch.testing.assert_close(ours, other, rtol=1e-6, atol=1e-8)
    for n, value in fwd.updates.items():
        torch.testing.assert_close(value, statistics[n])
    assert set(fwd.updates) == (set(statistics) if training else set())


@pytest.mark.parametrize("name", CASES)
def test_a_built_in_module_stands_the_trial_of_users_modules(name: str) -> None:
    """It is not tried out itself, so its layers and the way to run it must be found right."""
    config, shape, _ = CASES[name]
    for norm, dropout in ("none", 0.0), ("batch", 0.5), ("group", 0.5):
        options = {"norm": norm} | ({} if "resnet" in name else {"dropout": dropout})
        body = network(shape, **{**config, **options}).body
        module = parse({"model": {**config, **options}}).model.make_module(shape)
        tried = ModuleBody(module, torch.randn(6, *shape), head_layer="none")
        assert isinstance(body, ModuleBody)
        assert body.examination == tried.examination
        assert not tried.examination.stacked_mode
        assert tried.vector_reason is None
        assert tried.unprotected == ()


@pytest.mark.parametrize("name", CASES)
def test_layers_give_the_columns_of_each_weight(name: str) -> None:
    """im2col with a layer's own geometry, times its weight, is the layer: for every layer."""
    config, shape, _ = CASES[name]
    net = network(shape, **config)
    params, buffers = net.init(torch.Generator().manual_seed(0))
    layer_inputs: dict[str, Tensor] = {}
    net.features(
        params, torch.randn(2, *shape), ForwardPass(buffers=buffers, layer_inputs=layer_inputs)
    )
    assert list(layer_inputs) == [layer.name for layer in net.layers]
    weights = {n for n, p in params.items() if p.dim() > 1 and not n.startswith("head.")}
    assert set(layer_inputs) == {layer.name for layer in net.layers} == weights
    for layer in net.layers:
        x, weight = layer_inputs[layer.name], params[layer.name]
        assert weight.flatten(1).shape == (layer.outputs, layer.inputs)
        if layer.kind == "conv":
            stride, padding, *_ = layer.geometry.args
            columns = F.unfold(x, layer.kernel, padding=padding, stride=stride)
            direct = F.conv2d(x, weight, None, stride, padding).flatten(2)
            torch.testing.assert_close(weight.flatten(1) @ columns, direct, rtol=1e-3, atol=1e-4)
        else:
            assert x.shape[-1] == layer.inputs


def test_initial_values_are_distributed_as_in_torch() -> None:
    net = network((1, 28, 28), hidden=[300])
    params, _ = net.init(torch.Generator().manual_seed(0))
    theirs = nn.Linear(784, 300)
    weight = params["fc1.weight"]
    assert float(weight.abs().max()) <= 1 / math.sqrt(784)
    torch.testing.assert_close(weight.std(), theirs.weight.std(), rtol=0.01, atol=0)
    assert float(params["fc1.bias"].abs().max()) <= 1 / math.sqrt(784)
    head = params["head.weight"]
    torch.testing.assert_close(head.std(), nn.Linear(300, 10).weight.std(), rtol=0.1, atol=0)


@pytest.mark.parametrize(("kind", "fan"), [("resnet20", 16 * 9), ("resnet18", 64 * 9)])
def test_initial_weights_of_residual_networks_have_he_normal_deviation(kind: str, fan: int) -> None:
    params, _ = network((3, 32, 32), kind=kind).init(torch.Generator().manual_seed(0))
    std = params["layer1.0.conv1.weight"].std()
    torch.testing.assert_close(float(std), math.sqrt(2 / fan), rtol=0.05, atol=0)


def test_a_deep_residual_network_without_norms_starts_with_small_features() -> None:
    """With He's scheme its features would have a standard deviation of about 70."""
    net = network((3, 32, 32), kind="resnet32", norm="none")
    params, buffers = net.init(torch.Generator().manual_seed(0))
    assert buffers == {}
    assert not [name for name in params if "bn" in name]
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert 0.01 < float(net.features(params, x, ForwardPass()).std()) < 2


def test_weights_and_biases_are_drawn_layer_by_layer_and_the_head_last() -> None:
    params, _ = network((1, 8, 8), hidden=[20, 12], norm="batch").init(
        torch.Generator().manual_seed(4)
    )
    generator = torch.Generator().manual_seed(4)
    for name, inputs, outputs in ("fc1", 64, 20), ("fc2", 20, 12), ("head", 12, 10):
        for key, shape in ("weight", (outputs, inputs)), ("bias", (outputs,)):
            bound = 1 / math.sqrt(inputs)
            drawn = torch.empty(shape).uniform_(-bound, bound, generator=generator)
            assert torch.equal(params[f"{name}.{key}"], drawn)
    norms = [name for name in params if name.startswith("bn")]
    assert norms == ["bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias"]
    assert list(params)[:4] == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def test_residual_networks_draw_the_shortcut_after_its_block() -> None:
    params, buffers = network((3, 8, 8), kind="resnet18", width=2).init(
        torch.Generator().manual_seed(4)
    )
    generator, inputs, drawn = torch.Generator().manual_seed(4), 2, {}

    def draw(name: str, outputs: int, inputs: int, kernel: int) -> None:
        std = math.sqrt(2 / (outputs * kernel**2))
        shape = (outputs, inputs, kernel, kernel)
        drawn[f"{name}.weight"] = torch.empty(shape).normal_(0, std, generator=generator)

    draw("conv1", 2, 3, 3)
    for stage, block in itertools.product(range(4), range(2)):
        name, outputs = f"layer{stage + 1}.{block}", 2 * 2**stage
        draw(f"{name}.conv1", outputs, inputs, 3)
        draw(f"{name}.conv2", outputs, outputs, 3)
        if outputs != inputs:
            draw(f"{name}.downsample.0", outputs, inputs, 1)
        inputs = outputs
    assert list(params)[: len(drawn)] == list(drawn)
    assert all(torch.equal(params[name], value) for name, value in drawn.items())
    norms = ["bn1", "layer1.0.bn1", "layer1.0.bn2", "layer1.1.bn1", "layer1.1.bn2",
             "layer2.0.bn1", "layer2.0.bn2", "layer2.0.downsample.1"]  # fmt: skip
    assert [name.rpartition(".")[0] for name in buffers][: 2 * len(norms) : 2] == norms


def test_init_depends_on_the_generator_alone() -> None:
    state = torch.get_rng_state()
    net = network((1, 8, 8))
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (net.init(torch.Generator().manual_seed(s))[0] for s in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["fc1.weight"], c["fc1.weight"])


@pytest.mark.parametrize(
    ("kind", "shape", "size"),
    [
        ("resnet18-reduced", (3, 32, 32), 160 * 4),  # GPM's net for 5-Datasets
        ("resnet18-reduced", (3, 84, 84), 160 * 9),  # and for Mini-ImageNet
        ("resnet18-reduced", (1, 8, 8), 160),
        ("resnet18", (3, 224, 224), 512),
        ("resnet20", (1, 28, 28), 64),
        ("alexnet", (3, 32, 32), 2048),
        ("conv", (1, 8, 12), 128),
    ],
)
def test_feature_size_matches_the_features(
    kind: str, shape: tuple[int, int, int], size: int
) -> None:
    net = network(shape, kind=kind)
    params, buffers = net.init(torch.Generator().manual_seed(0))
    assert net.feature_size == size
    assert net.logits(params, torch.randn(1, *shape), ForwardPass(buffers=buffers)).shape == (1, 10)


@pytest.mark.parametrize("kind", ["resnet20", "conv"])
def test_group_norm_and_no_running_statistics_leave_no_buffers(kind: str) -> None:
    for options in ({"norm": "group"}, {"norm": "batch", "running_stats": False}):
        net = network((3, 16, 16), kind=kind, width=6, **options)
        params, buffers = net.init(torch.Generator().manual_seed(0))
        fwd = ForwardPass(batch_statistics=True)
        assert bool(net.logits(params, torch.randn(4, 3, 16, 16), fwd).isfinite().all())
        assert buffers == {}
        assert fwd.updates == {}


@pytest.mark.parametrize(
    ("shape", "config", "parts"),
    [
        ((1024,), {"kind": "conv"}, ["model.kind", "'conv'", "mlp"]),
        ((1024,), {"kind": "resnet20"}, ["model.kind", "'resnet20'"]),
        ((1, 3, 3), {"kind": "conv"}, ["model.kind", "3x3"]),
        ((1, 18, 18), {"kind": "alexnet"}, ["model.kind", "18x18"]),
        ((1, 8, 8), {"dropout": [0.1]}, ["model.dropout", "[0.1]", "3"]),
        ((1, 8, 8), {"kind": "conv", "dropout": [0.1]}, ["model.dropout", "3"]),
        ((3, 8, 8), {"kind": "resnet20", "dropout": 0.5}, ["model.dropout", "0.5", "resnet20"]),
    ],
)
def test_models_that_cannot_be_built_are_refused(
    shape: tuple[int, ...], config: dict[str, object], parts: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        network(shape, **config)
    assert all(part in str(caught.value) for part in parts)
    assert "\n" not in str(caught.value)


def test_a_single_dropout_rate_does_not_apply_to_the_input() -> None:
    x = torch.ones(4, 50)
    params = {"head.weight": torch.ones(10, 50), "head.bias": torch.zeros(10)}
    fwd = ForwardPass(train=True, key=torch.tensor(3))
    spared = network((50,), hidden=[], dropout=0.5).features(params, x, fwd)
    dropped = network((50,), hidden=[], dropout=[0.5]).features(params, x, fwd)
    assert torch.equal(spared, x)
    assert int((dropped == 0).sum()) > 50


@pytest.mark.parametrize("stacked", [False, True])
def test_group_norm_of_a_single_row_is_that_of_the_row_among_others(stacked: bool) -> None:
    """Also with groups of a single value, which are normalized to the bias."""
    draws = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(shape, generator=draws, dtype=torch.float64) for shape in ((5, 8), 8, 8)
    )
    for groups in (2, 8):
        fwd = ForwardPass(stacked=stacked)
        alone, together = (ops.group_norm(rows, groups, weight, bias, fwd) for rows in (x[2:3], x))
        torch.testing.assert_close(alone, together[2:3])
    torch.testing.assert_close(alone, bias[None])
