"""Batch and group norm against torch.nn, with masks and under vmap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from perdure.models import ForwardPass, ops
from perdure.models.norms import masked_norm

SHAPES = [(6, 4), (6, 4, 3, 5)]


def rand(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64) * 3 + 2


def torchs(shape: tuple[int, ...], **options: bool) -> nn.Module:
    kind = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    norm = kind(shape[1], dtype=torch.float64, **options)
    with torch.no_grad():
        norm.weight.copy_(rand(shape[1], seed=1))
        norm.bias.copy_(rand(shape[1], seed=2))
    return norm


def ours(norm: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    params = {f"bn.{n}": p.detach().clone().requires_grad_() for n, p in norm.named_parameters()}
    buffers = {f"bn.{n}": b.clone() for n, b in norm.named_buffers() if "tracked" not in n}
    return params, buffers


def same_gradients(a: Tensor, a_inputs: list[Tensor], b: Tensor, b_inputs: list[Tensor]) -> None:
    upstream = rand(*a.shape, seed=9)
    our_grads = torch.autograd.grad(a, a_inputs, upstream, retain_graph=True)
    other = torch.autograd.grad(b, b_inputs, upstream, retain_graph=True)
    torch.testing.assert_close(our_grads, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_batch_statistics_equal_those_of_torch(shape: tuple[int, ...], masked: bool) -> None:
    norm = torchs(shape)
    params, buffers = ours(norm)
    mask = torch.ones(shape[0], dtype=torch.float64) if masked else None
    fwd = ForwardPass(batch_statistics=True, buffers=buffers, mask=mask)
    x = rand(*shape).requires_grad_()
    out, theirs = ops.batch_norm(x, fwd, *params.values(), "bn"), norm(x)
    torch.testing.assert_close(out, theirs)
    same_gradients(out, [x, *params.values()], theirs, [x, *norm.parameters()])
    for name in "running_mean", "running_var":
        torch.testing.assert_close(fwd.updates[f"bn.{name}"], getattr(norm, name))
    assert torch.equal(buffers["bn.running_mean"], torch.zeros_like(norm.running_mean))


@pytest.mark.parametrize("shape", SHAPES)
def test_running_statistics_equal_those_of_torch(shape: tuple[int, ...]) -> None:
    norm = torchs(shape)
    norm(rand(*shape, seed=5))
    norm.eval()
    params, buffers = ours(norm)
    x = rand(*shape).requires_grad_()
    fwd = ForwardPass(buffers=buffers)
    out, theirs = ops.batch_norm(x, fwd, *params.values(), "bn"), norm(x)
    torch.testing.assert_close(out, theirs)
    same_gradients(out, [x, *params.values()], theirs, [x, *norm.parameters()])
    assert fwd.updates == {}


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_without_running_statistics_those_of_the_batch_are_used(batch_statistics: bool) -> None:
    norm = torchs(SHAPES[1], track_running_stats=False).eval()
    params, buffers = ours(norm)
    fwd = ForwardPass(batch_statistics=batch_statistics)
    x = rand(*SHAPES[1])
    torch.testing.assert_close(ops.batch_norm(x, fwd, *params.values(), None), norm(x))
    assert fwd.updates == {}
    assert buffers == {}


@pytest.mark.parametrize("shape", SHAPES)
def test_masked_rows_do_not_count(shape: tuple[int, ...]) -> None:
    """Padding changes neither the real rows' output nor the statistics nor the gradients."""
    norm = torchs(shape)
    params, buffers = ours(norm)
    x = rand(*shape).requires_grad_()
    padded = torch.cat([x, 1000 * rand(3, *shape[1:], seed=4)])
    mask = (torch.arange(shape[0] + 3) < shape[0]).double()
    fwd = ForwardPass(batch_statistics=True, buffers=buffers, mask=mask)
    out, theirs = ops.batch_norm(padded, fwd, *params.values(), "bn")[: shape[0]], norm(x)
    torch.testing.assert_close(out, theirs)
    same_gradients(out, [x, *params.values()], theirs, [x, *norm.parameters()])
    torch.testing.assert_close(fwd.updates["bn.running_var"], norm.running_var)


def test_the_gradient_of_masked_rows_is_exact() -> None:
    """Also where padding rows get a gradient, it is that of the formula."""
    row_weights = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)[:, None]
    values = [rand(3, 2), rand(2, seed=1), rand(2, seed=2)]
    inputs = [v.requires_grad_() for v in values]
    assert torch.autograd.gradcheck(
        lambda x, w, b: masked_norm(x, w, b, row_weights, 1e-5)[0], inputs
    )


@pytest.mark.parametrize("rows", [0, 1])
def test_statistics_of_zero_rows_and_of_one_are_finite(rows: int) -> None:
    norm = torchs((6, 4))
    params, buffers = ours(norm)
    buffers = {name: value + 5 for name, value in buffers.items()}
    fwd = ForwardPass(
        batch_statistics=True, buffers=buffers, mask=(torch.arange(6) < rows).double()
    )
    out = ops.batch_norm(rand(6, 4), fwd, *params.values(), "bn")
    assert bool(out.isfinite().all())
    moved = not torch.equal(fwd.updates["bn.running_mean"], buffers["bn.running_mean"])
    assert moved == (rows == 1)
    assert all(bool(value.isfinite().all()) for value in fwd.updates.values())


def test_one_row_without_a_mask_gives_finite_values() -> None:
    params, buffers = ours(torchs((1, 4)))
    fwd = ForwardPass(batch_statistics=True, buffers=buffers)
    out = ops.batch_norm(rand(1, 4), fwd, *params.values(), "bn")
    torch.testing.assert_close(out[0], params["bn.bias"].detach(), check_dtype=False)
    assert all(bool(value.isfinite().all()) for value in fwd.updates.values())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_under_vmap_equals_a_loop(shape: tuple[int, ...], masked: bool) -> None:
    clients = 3
    norms = [torchs(shape) for _ in range(clients)]
    x = rand(clients, *shape).requires_grad_()
    weight, bias = rand(clients, shape[1], seed=3), rand(clients, shape[1], seed=4)
    mean, var = torch.zeros(clients, shape[1]).double(), torch.ones(clients, shape[1]).double()
    mask = (torch.arange(shape[0]) < torch.tensor([[6], [4], [3]])).double()
    mask = mask if masked else torch.ones_like(mask)

    def one(x, w, b, mean, var, mask):  # type: ignore[no-untyped-def]
        buffers = {"bn.running_mean": mean, "bn.running_var": var}
        fwd = ForwardPass(
            batch_statistics=True, buffers=buffers, mask=mask if masked else None, stacked=True
        )
        out = ops.batch_norm(x, fwd, w, b, "bn")
        return out, fwd.updates

    out, updates = vmap(one)(x, weight, bias, mean, var, mask)
    for k, norm in enumerate(norms):
        with torch.no_grad():
            norm.weight.copy_(weight[k])
            norm.bias.copy_(bias[k])
        rows = int(mask[k].sum())
        theirs = norm(x[k, :rows])
        torch.testing.assert_close(out[k, :rows], theirs)
        same_gradients(out[k, :rows], [x], theirs, [x])
        torch.testing.assert_close(updates["bn.running_mean"][k], norm.running_mean)
        torch.testing.assert_close(updates["bn.running_var"][k], norm.running_var)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_group_norm_equals_that_of_torch(shape: tuple[int, ...], stacked: bool) -> None:
    norm = nn.GroupNorm(2, shape[1], dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(rand(shape[1], seed=1))
    params = {f"gn.{n}": p for n, p in norm.named_parameters()}
    x = rand(*shape).requires_grad_()
    out, theirs = ops.group_norm(x, 2, *params.values(), ForwardPass(stacked=stacked)), norm(x)
    torch.testing.assert_close(out, theirs)
    same_gradients(out, [x, *params.values()], theirs, [x, *params.values()])
