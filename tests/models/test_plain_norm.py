"""Batch norm of one client is exact to rounding, so that clients alone and stacked agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from perdure.config import parse
from perdure.models import ForwardPass, Network, Outputs, make_network, ops

Tree = dict[str, Tensor]

LAYOUTS = [torch.contiguous_format, torch.channels_last]
MANY = (16, 4, 56, 56)
"""A channel of 50 176 values: one after another, their sum in float32 is off by 1e-5."""


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def normed(x: Tensor, weight: Tensor, bias: Tensor, upstream: Tensor) -> list[Tensor]:
    """Output, new statistics, and the gradients of input, weight and bias."""
    inputs = [value.detach().requires_grad_() for value in (x, weight, bias)]
    fwd = ForwardPass(batch_statistics=True, buffers=statistics(x))
    params = {"bn.weight": inputs[1], "bn.bias": inputs[2]}
    out = ops.batch_norm(inputs[0], fwd, *params.values(), "bn")
    return [out, *fwd.updates.values(), *torch.autograd.grad(out, inputs, upstream)]


def statistics(x: Tensor) -> Tree:
    return {"bn.running_mean": x.new_zeros(x.shape[1]), "bn.running_var": x.new_ones(x.shape[1])}


def relative(computed: Tensor, expected: Tensor) -> float:
    return float(
        (computed.detach() - expected.detach()).abs().max() / expected.detach().abs().max()
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_statistics_of_many_values_are_exact(layout: torch.memory_format) -> None:
    values = [rand(*MANY) + 0.5, rand(4, seed=1), rand(4, seed=2), rand(*MANY, seed=3)]
    laid = [value.contiguous(memory_format=layout) for value in (values[0], values[3])]
    computed = normed(laid[0], values[1], values[2], laid[1])
    expected = normed(*[value.double() for value in values])
    assert max(map(relative, computed, expected)) < 1e-6


@pytest.mark.parametrize("shape", [(1, 500), (1, 500, 1, 1)], ids=str)
def test_a_single_value_per_channel_gives_exactly_the_bias(shape: tuple[int, ...]) -> None:
    bias = rand(500, seed=2)
    out, *_, for_x, for_weight, for_bias = normed(
        100 * rand(*shape), rand(500, seed=1), bias, rand(*shape, seed=3)
    )
    assert torch.equal(out.flatten(), bias)
    assert torch.equal(for_bias, rand(*shape, seed=3).flatten())
    assert not for_x.any()
    assert not for_weight.any()


@pytest.mark.parametrize("shape", [(20, 3, 5, 4), (300, 3, 1, 1), (1, 3, 17, 17), (300, 3)])
def test_output_statistics_and_gradients_equal_those_of_torch(shape: tuple[int, ...]) -> None:
    values = [3 * rand(*shape) + 2, rand(3, seed=1), rand(3, seed=2), rand(*shape, seed=3)]
    x, weight, bias, upstream = (value.double() for value in values)
    norm = torch.nn.BatchNorm1d(3) if x.dim() == 2 else torch.nn.BatchNorm2d(3)
    norm.double().load_state_dict({**norm.state_dict(), "weight": weight, "bias": bias})
    x.requires_grad_()
    out = norm(x)
    expected = torch.autograd.grad(out, [x, norm.weight, norm.bias], upstream)
    ours = normed(x, weight, bias, upstream)
    theirs = [out, norm.running_mean, norm.running_var, *expected]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_frozen_inputs_get_no_gradient() -> None:
    weight = torch.ones(4, requires_grad=True)
    params = {"bn.weight": weight, "bn.bias": torch.zeros(4)}
    x = rand(*MANY)
    fwd = ForwardPass(batch_statistics=True, buffers=statistics(x))
    out = ops.batch_norm(x, fwd, *params.values(), "bn")
    assert x.grad is None
    assert torch.autograd.grad(out.square().sum(), weight)[0].shape == (4,)


def test_per_example_gradients_with_batch_statistics_are_exact() -> None:
    """As a method takes them that looks at one example after another, mapped over them."""
    x = rand(3, 2, 17, 17).double()
    params = {"bn.weight": rand(2).double(), "bn.bias": rand(2).double()}

    def loss(params: Tree, x: Tensor, mapped: bool = True) -> Tensor:
        fwd = ForwardPass(under_vmap=mapped)
        return ops.batch_norm(x[None], fwd, *params.values(), None).pow(3).sum()

    each = vmap(grad(loss), in_dims=(None, 0))(params, x)["bn.weight"]
    for row, computed in zip(x, each, strict=True):
        leaf = params["bn.weight"].clone().requires_grad_()
        alone = torch.autograd.grad(loss({**params, "bn.weight": leaf}, row, False), leaf)[0]
        torch.testing.assert_close(computed, alone)


class Clients:
    """Clients that start alike and take two local steps, with batches that are full or are not."""

    rows = ((16, 16), (12, 1), (1, 16))
    """Rows of each step of each client."""

    def __init__(self, config: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        outputs = Outputs("shared", 4, ((0, 1, 2, 3),))
        self.net: Network = make_network(parse({"model": config}).model, shape, outputs)
        rng = torch.Generator().manual_seed(0)
        self.start = tuple(cast(tree, dtype) for tree in self.net.init(rng))
        self.x = torch.randn(2, len(self.rows), 16, *shape, generator=rng).to(dtype)
        self.y = torch.randint(4, self.x.shape[:3], generator=rng)

    def loss(
        self, params: Tree, buffers: Tree, x: Tensor, y: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tree]:
        fwd = ForwardPass(True, buffers, True, torch.tensor(0), mask, stacked=mask is not None)
        losses = ops.cross_entropy(self.net.logits(params, x, fwd), y)
        return losses.mean() if mask is None else (losses * mask).sum() / mask.sum(), fwd.updates

    def alone(self, client: int) -> Tree:
        params, buffers = self.start
        for step, rows in enumerate(self.rows[client]):
            leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
            x, y = self.x[step, client, :rows], self.y[step, client, :rows]
            loss, updates = self.loss(leaves, buffers, x, y, None)
            params, buffers = stepped(leaves, loss), buffers | updates
        return params | buffers

    def stacked(self) -> Tree:
        many = len(self.rows)
        params, buffers = (
            {name: value.expand(many, *value.shape) for name, value in tree.items()}
            for tree in self.start
        )
        for step, rows in enumerate(zip(*self.rows, strict=True)):
            mask = (torch.arange(16) < torch.tensor(rows)[:, None]).float()
            leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
            losses, updates = vmap(self.loss)(leaves, buffers, self.x[step], self.y[step], mask)
            params, buffers = stepped(leaves, losses.sum()), buffers | updates
        return params | buffers


def cast(tree: Tree, dtype: torch.dtype) -> Tree:
    return {name: value.to(dtype) for name, value in tree.items()}


def stepped(leaves: Tree, loss: Tensor) -> Tree:
    grads = torch.autograd.grad(loss, list(leaves.values()))
    return {
        name: (value - 0.05 * grad).detach()
        for (name, value), grad in zip(leaves.items(), grads, strict=True)
    }


def difference(clients: Clients) -> float:
    stacked = clients.stacked()
    return max(
        float((value - stacked[name][client]).abs().max())
        for client in range(len(clients.rows))
        for name, value in clients.alone(client).items()
    )


CONV = {"kind": "conv", "width": 4, "norm": "batch"}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (CONV, (1, 8, 8)),
        (CONV, (1, 28, 28)),
        ({"kind": "resnet18", "width": 4, "norm": "batch"}, (1, 8, 8)),
        ({"kind": "resnet20", "width": 4, "norm": "batch"}, (3, 8, 8)),
        ({"kind": "mlp", "hidden": [16, 16], "norm": "batch"}, (20,)),
    ],
    ids=str,
)
def test_clients_alone_and_stacked_take_the_same_steps(
    config: dict[str, Any], shape: tuple[int, ...]
) -> None:
    assert difference(Clients(config, shape, torch.float64)) < 1e-9


def test_clients_alone_and_stacked_take_the_same_steps_in_float32() -> None:
    assert difference(Clients(CONV, (1, 28, 28), torch.float32)) < 1e-5
