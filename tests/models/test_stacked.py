"""Every model stacked under vmap equals a loop over clients, also as a traced graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from perdure.config import parse
from perdure.core.rng import Rng
from perdure.models import ForwardPass, Network, Outputs, make_network, ops

CLIENTS, ROWS = 3, 5
IMAGE = (3, 16, 16)
CASES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"kind": "mlp", "hidden": [12, 8], "dropout": [0.1, 0.2, 0.5]}, (1, 4, 4)),
    ({"kind": "mlp", "hidden": [12], "norm": "batch"}, (30,)),
    ({"kind": "mlp", "hidden": [16], "norm": "group", "bias": False}, (30,)),
    ({"kind": "conv", "width": 4, "dropout": 0.3}, (1, 8, 8)),
    ({"kind": "conv", "width": 16, "norm": "batch", "dropout": 0.1}, (3, 28, 28)),
    ({"kind": "alexnet", "width": 2, "norm": "batch", "dropout": 0.2}, (3, 20, 20)),
    ({"kind": "resnet18-reduced", "width": 2}, IMAGE),
    ({"kind": "resnet18-reduced", "width": 2, "norm": "none"}, IMAGE),
    ({"kind": "resnet18", "width": 2, "running_stats": False}, IMAGE),
    ({"kind": "resnet20", "width": 2, "norm": "group"}, IMAGE),
    ({"kind": "resnet20", "width": 2}, IMAGE),
    ({"kind": "resnet32", "width": 2}, (3, 8, 8)),
]
IDS = [" ".join(str(v) for v in config.values()) for config, _ in CASES]


class Setting:
    """Clients with separate weights, data, noise and masks, in float64."""

    def __init__(self, config: dict[str, Any], shape: tuple[int, ...], kind: str = "growing"):
        outputs = Outputs(kind, 4, ((0, 2), (1, 3)))  # type: ignore[arg-type]
        self.net: Network = make_network(parse({"model": config}).model, shape, outputs)
        starts = [self._start(client) for client in range(CLIENTS)]
        self.params = self._stack([params for params, _ in starts])
        self.buffers = self._stack([buffers for _, buffers in starts])
        rng = torch.Generator().manual_seed(5)
        self.x = torch.randn(CLIENTS, ROWS, *shape, generator=rng, dtype=torch.float64)
        self.y = torch.randint(4, (CLIENTS, ROWS), generator=rng)
        self.keys = torch.tensor([11, 22, 33])
        self.mask = (torch.arange(ROWS) < torch.tensor([[5], [4], [3]])).double()

    def _start(self, client: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        rng = Rng(client)
        params, buffers = self.net.init(rng.torch_generator("init"))
        return self.net.grow(params, 1, rng), buffers

    def _stack(self, trees: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([tree[name] for tree in trees]).double() for name in trees[0]}

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.params, self.buffers, self.x, self.y, self.keys, self.mask

    def loss(self, params, buffers, x, y, key, mask, stacked=True):  # type: ignore[no-untyped-def]
        fwd = ForwardPass(True, buffers, True, key, mask, stacked)
        losses = ops.cross_entropy(self.net.logits(params, x, fwd), y)
        return (losses if mask is None else losses * mask).sum() / len(y), fwd.updates

    def stacked(self, params, *rest):  # type: ignore[no-untyped-def]
        losses, updates = vmap(self.loss)(params, *rest)
        return losses, torch.autograd.grad(losses.sum(), list(params.values())), updates

    def alone(self, client: int) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
        """A client's pass over its real rows only, with no padding and no mask."""
        rows = int(self.mask[client].sum())
        params = {n: p[client].clone().requires_grad_() for n, p in self.params.items()}
        buffers = {n: b[client] for n, b in self.buffers.items()}
        x, y = self.x[client, :rows], self.y[client, :rows]
        loss, updates = self.loss(params, buffers, x, y, self.keys[client], None, stacked=False)
        loss = loss * rows / ROWS
        return loss, list(torch.autograd.grad(loss, list(params.values()))), updates


def leaves(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone().requires_grad_() for name, value in params.items()}


@pytest.mark.parametrize(("config", "shape"), CASES, ids=IDS)
def test_stacked_clients_equal_a_loop_over_clients(
    config: dict[str, Any], shape: tuple[int, ...]
) -> None:
    setting = Setting(config, shape)
    params, *rest = setting.arguments
    losses, gradients, updates = setting.stacked(leaves(params), *rest)
    for client in range(CLIENTS):
        loss, own, own_updates = setting.alone(client)
        torch.testing.assert_close(losses[client], loss)
        for stacked, single in zip(gradients, own, strict=True):
            torch.testing.assert_close(stacked[client], single, rtol=1e-5, atol=1e-8)
        assert set(updates) == set(own_updates)
        for name, value in own_updates.items():
            torch.testing.assert_close(updates[name][client], value)


@pytest.mark.parametrize(("config", "shape"), CASES, ids=IDS)
def test_a_traced_step_repeats_on_other_values(
    config: dict[str, Any], shape: tuple[int, ...]
) -> None:
    setting = Setting(config, shape)
    params, *rest = setting.arguments
    graph = make_fx(setting.stacked)(leaves(params), *rest)
    other = {name: value * 0.9 for name, value in params.items()}
    rest[2] = rest[2].flip(0)
    rest[3] = rest[3] + 7
    with torch.no_grad():
        traced = graph(other, *rest)
    direct = setting.stacked(leaves(other), *rest)
    torch.testing.assert_close(traced[0], direct[0])
    torch.testing.assert_close(list(traced[1]), list(direct[1]), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(traced[2], direct[2])


def test_a_traced_step_of_an_mlp_has_few_operations() -> None:
    """What makes stacked clients fast: batched products, and nothing that copies a weight."""
    setting = Setting({"kind": "mlp", "hidden": [12, 8]}, (1, 4, 4), "shared")
    params, *rest = setting.arguments
    graph = make_fx(setting.stacked)(leaves(params), *rest)
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names.count("aten.baddbmm.default") == 3
    assert names.count("aten.bmm.default") == 5  # no gradient for the images
    assert len(names) <= 55
    copies = {"aten.clone.default", "aten.copy_.default", "aten.expand_copy.default"}
    assert not copies & set(names)
