"""Any nn.Module as a body: the values and gradients of the module itself, alone and stacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import user_modules
from torch import Tensor, nn

from perdure.core.trees import Tensors
from perdure.methods.parts.protected_layers import layer_columns
from perdure.models import ForwardPass
from perdure.models.adapter import module_body
from perdure.models.adapter.module_body import ModuleBody

ROWS = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(3))
MODULES: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: user_modules.WithHead(user_modules.ConvNorm(dropout=0.0), 128),
    "attention": lambda: user_modules.WithHead(user_modules.Vit(), 16),
    "odd convolutions": user_modules.OddConvs,
    "functions": lambda: user_modules.Functional(0.0),
    "tied weights": user_modules.Tied,
    "transformer encoder": lambda: user_modules.Encoder(0.0),
    "lstm": user_modules.Recurrent,
    "sequences": user_modules.Sequence,
    "in place": user_modules.InPlace,
    "branch on values": user_modules.BranchOnValues,
}


def double(name: str) -> tuple[nn.Module, ModuleBody]:
    """Return a module, with norms that are not the identity, and its body, both in double."""
    torch.manual_seed(0)
    module = MODULES[name]()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(part.weight, 0.5, 2)
            nn.init.normal_(part.running_mean)
            nn.init.uniform_(part.running_var, 0.5, 2)
    return module.double(), ModuleBody(module.float(), ROWS).in_double()


def logits(body: ModuleBody, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
    head = {name: value.double() for name, value in body.initial_head.items()}
    features = body.features(params, x, fwd)
    return nn.functional.linear(features, head["head.weight"], head["head.bias"])


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_values_gradients_and_statistics_are_those_of_the_module(name: str, train: bool) -> None:
    module, body = double(name)
    module = module.double().train(train)
    params, buffers = body.init(torch.Generator())
    params = {n: p.requires_grad_() for n, p in params.items()}
    x = ROWS.double()
    fwd = ForwardPass(train=train, buffers=buffers, batch_statistics=train)
    ours, theirs = logits(body, params, x, fwd), module(x)
    if name == "functions":
        ours = ours.log_softmax(1)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    (ours * torch.arange(10)).sum().backward()
    (theirs * torch.arange(10)).sum().backward()
    for path, parameter in module.named_parameters():
        if path in params:
            torch.testing.assert_close(
                params[path].grad, parameter.grad, rtol=1e-8, atol=1e-9, msg=path
            )
    after = dict(module.named_buffers())
    assert set(fwd.updates) == (set(buffers) if train else set())
    for path, value in fwd.updates.items():
        torch.testing.assert_close(value, after[path], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("statistics", ["running", "of the batch"])
def test_rows_are_predicted_in_parts_unless_a_norm_needs_all(
    statistics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16, track_running_stats=statistics == "running")
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norm, nn.Linear(16, 3)).eval()
    calls: list[int] = []
    module[0].register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    body = ModuleBody(module, ROWS)
    monkeypatch.setattr(module_body, "PART_VALUES", 2 * 64)
    params, buffers = body.init(torch.Generator())
    expected = module[:3](ROWS)
    calls.clear()
    features = body.features(params, ROWS, ForwardPass(buffers=buffers))
    torch.testing.assert_close(features, expected)
    assert calls == ([2, 2, 2] if statistics == "running" else [6])


@pytest.mark.parametrize("name", [n for n in MODULES if n not in ("lstm", "branch on values")])
def test_a_stack_with_padding_equals_single_clients(name: str) -> None:
    _, body = double(name)
    assert body.vector_reason is None
    params, buffers = body.init(torch.Generator())
    clients = [params, {n: p * 1.1 for n, p in params.items()}]
    stacked = {n: torch.stack([c[n] for c in clients]).requires_grad_() for n in params}
    mask = torch.tensor([1.0] * 4 + [0.0] * 2).double()
    fwd = ForwardPass(train=True, buffers=buffers, batch_statistics=True)
    images = ROWS.double().expand(2, *ROWS.shape)

    def one(params: Tensors, x: Tensor) -> Tensor:
        return body.features(params, x, replace(fwd, mask=mask, stacked=True, updates={}))

    together = torch.vmap(one)(stacked, images)[:, :4]
    leaves = [{n: p.clone().requires_grad_() for n, p in client.items()} for client in clients]
    alone = torch.stack(
        [body.features(c, ROWS[:4].double(), replace(fwd, updates={})) for c in leaves]
    )
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    grads = torch.autograd.grad(together.square().sum(), list(stacked.values()), allow_unused=True)
    alone.square().sum().backward()
    for path, grad in zip(stacked, grads, strict=True):
        expected = [c[path].grad for c in leaves]
        if grad is not None and expected[0] is not None:
            torch.testing.assert_close(grad, torch.stack(expected), rtol=1e-8, atol=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("lstm", "Batching rule not implemented for aten::lstm"), ("branch on values", "vmap")],
)
def test_it_says_why_clients_cannot_be_stacked(name: str, reason: str) -> None:
    _, body = double(name)
    assert body.vector_reason is not None
    assert reason in body.vector_reason


NO_FREE_INPUTS = ("lstm", "branch on values", "in place")


@pytest.mark.parametrize("name", [n for n in MODULES if n not in NO_FREE_INPUTS])
def test_a_change_outside_of_the_recorded_inputs_changes_no_layer_output(name: str) -> None:
    """Weight times recorded columns is what the layer adds: so protecting them protects it."""
    _, body = double(name)
    params, buffers = body.init(torch.Generator())
    inputs: Tensors = {}
    x = ROWS[:1].double()
    before = body.features(params, x, ForwardPass(buffers=buffers, layer_inputs=inputs))
    assert list(inputs) == [layer.name for layer in body.layers]
    generator, changed = torch.Generator().manual_seed(0), dict(params)
    for layer in body.layers:
        columns = layer_columns(inputs[layer.name], layer)
        _, s, v = torch.linalg.svd(columns.T, full_matrices=True)
        free = v[int((s > 1e-10 * s[0]).sum()) :].T
        noise = torch.randn(layer.outputs, layer.inputs, generator=generator, dtype=torch.float64)
        changed[layer.name] = params[layer.name] + (noise @ free @ free.T).reshape(
            params[layer.name].shape
        )
    moved = max(float((changed[n] - params[n]).abs().max()) for n in params)
    assert moved > 0.1
    after = body.features(changed, x, ForwardPass(buffers=buffers))
    torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


def test_inputs_are_recorded_before_they_are_changed_in_place() -> None:
    module, body = double("in place")
    params, buffers = body.init(torch.Generator())
    inputs: Tensors = {}
    with torch.no_grad():
        body.features(params, ROWS.double(), ForwardPass(buffers=buffers, layer_inputs=inputs))
    expected = module.double().get_submodule("a")(ROWS.double())
    assert float(expected.min()) < 0
    torch.testing.assert_close(inputs["b.weight"], expected, rtol=1e-9, atol=1e-9)


def test_layers_and_unprotected_weights() -> None:
    names = {name: [layer.name for layer in double(name)[1].layers] for name in MODULES}
    assert names["functions"] == ["conv.weight", "weight", "fc2.weight"]
    assert names["tied weights"] == ["a.weight", "b.weight"]
    assert names["transformer encoder"][1:5] == [
        f"encoder.layers.0.{part}weight"
        for part in ("self_attn.in_proj_", "self_attn.out_proj.", "linear1.", "linear2.")
    ]
    assert names["lstm"] == []
    assert double("lstm")[1].unprotected == ("lstm.weight_ih_l0", "lstm.weight_hh_l0")
    assert double("attention")[1].unprotected == ("body.positions",)
    # a weight that is also used otherwise is not protected by its inputs
    assert double("branch on values")[1].unprotected == ("fc.weight",)


def test_dropout_is_hashed_and_leaves_the_global_generator_alone() -> None:
    for module in (user_modules.Functional(0.5), user_modules.Encoder(0.5)):
        body = ModuleBody(module, ROWS)
        params, buffers = body.init(torch.Generator())
        state = torch.get_rng_state()

        def features(key: int, body: ModuleBody = body, params: Tensors = params) -> Tensor:
            return body.features(params, ROWS, ForwardPass(train=True, key=torch.tensor(key)))

        assert torch.equal(features(1), features(1))
        assert not torch.equal(features(1), features(2))
        assert torch.equal(torch.get_rng_state(), state)
        evaluated = body.features(params, ROWS, ForwardPass(buffers=buffers, key=torch.tensor(1)))
        assert torch.equal(evaluated, body.features(params, ROWS, ForwardPass()))


def test_the_module_itself_is_not_changed() -> None:
    module = user_modules.WithHead(user_modules.ConvNorm(), 128)
    before = {n: v.clone() for n, v in module.state_dict().items()}
    body = ModuleBody(module, ROWS)
    params, buffers = body.init(torch.Generator())
    body.features(params, ROWS, ForwardPass(train=True, buffers=buffers, batch_statistics=True))
    assert all(torch.equal(before[n], v) for n, v in module.state_dict().items())
    assert module(ROWS).shape == (6, 10)


def test_a_norm_that_is_kept_in_evaluation_mode_keeps_its_statistics() -> None:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)  # type: ignore[return-value]

    net = nn.Sequential(nn.Conv2d(1, 4, 3), Frozen(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    nn.init.normal_(net[1].running_mean)  # type: ignore[arg-type]
    body = ModuleBody(net, ROWS)
    params, buffers = body.init(torch.Generator())
    fwd = ForwardPass(train=True, buffers=buffers, batch_statistics=True)
    expected = net.train()[:4](ROWS)
    torch.testing.assert_close(body.features(params, ROWS, fwd), expected)
    assert fwd.updates == {}


def test_frozen_parameters_are_constants() -> None:
    module = user_modules.WithHead(user_modules.ConvNorm(), 128)
    body = ModuleBody(module, ROWS, frozen=["body.conv1", "*.bn1.*", "body.fc1.bias"])
    params, buffers = body.init(torch.Generator())
    frozen = {"body.conv1.weight", "body.conv1.bias", "body.bn1.weight", "body.bn1.bias",
              "body.fc1.bias"}  # fmt: skip
    assert set(body.constants) == frozen
    assert not frozen & set(params)
    assert [layer.name for layer in body.layers] == ["body.conv2.weight", "body.fc1.weight"]
    fwd = ForwardPass(train=True, buffers=buffers, batch_statistics=True)
    body.features(params, ROWS, fwd)
    assert {name.split(".")[1] for name in fwd.updates} == {"bn2", "bn3"}


def test_names_that_are_reserved_for_heads_get_a_prefix() -> None:
    class PerceptronHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Flatten()
            self.head = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 10))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    body = ModuleBody(PerceptronHead(), ROWS)
    assert set(body.init(torch.Generator())[0]) == {"body.head.0.weight", "body.head.0.bias"}
    assert set(body.initial_head) == {"head.weight", "head.bias"}


def test_hooks_of_the_parts_of_a_sequential_are_called() -> None:
    doubled = nn.Linear(64, 5)
    doubled.register_forward_hook(lambda part, args, out: 2 * out)
    module = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(64, 64), nn.ReLU(), doubled),
                           nn.Linear(5, 3))  # fmt: skip
    body = ModuleBody(module, ROWS)
    params, _ = body.init(torch.Generator())
    torch.testing.assert_close(body.features(params, ROWS, ForwardPass()), module[:2](ROWS))
