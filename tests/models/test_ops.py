"""Each layer function against torch.nn, alone and stacked under vmap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional as F

from perdure.algebra.subspaces import Subspace
from perdure.models import ForwardPass, ops
from perdure.models.stacked import ConvGeometry

CLIENTS, ROWS = 3, 5


def rand(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.clone().requires_grad_() for t in tensors]


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((out * rand(*out.shape, seed=7)).sum(), inputs))


def assert_all_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for our_value, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_value, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(ROWS, 4), (2, ROWS, 4), (4,)])
def test_linear_equals_that_of_torch(stacked: bool, bias: bool, shape: tuple[int, ...]) -> None:
    values = leaves(rand(*shape), rand(6, 4), *([rand(6)] if bias else []))
    args = values if bias else [*values, None]
    out = ops.linear(*args, ForwardPass(stacked=stacked), "fc.weight")
    theirs = F.linear(*args)
    torch.testing.assert_close(out, theirs)
    assert_all_close(gradients(out, values), gradients(theirs, values))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared", [(), (0,), (1,), (2,), (1, 2), (0, 2)])
def test_stacked_linear_equals_a_loop(bias: bool, shared: tuple[int, ...]) -> None:
    """Any of input, weight and bias may be one for all clients."""
    full = [rand(CLIENTS, ROWS, 4), rand(CLIENTS, 6, 4), rand(CLIENTS, 6)]
    values = leaves(*(t[0] if i in shared else t for i, t in enumerate(full)))
    dims = tuple(None if i in shared else 0 for i in range(3))
    check_stacked(
        lambda x, w, b: ops.linear(x, w, b, ForwardPass(stacked=True), "w"),
        F.linear,
        values,
        dims,
        bias,
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_an_input_projection_removes_the_subspace_from_the_gradient(stacked: bool) -> None:
    """Rows of tokens; the other gradients and the output are the plain layer's."""
    x, w, b = leaves(rand(ROWS, 3, 4), rand(6, 4), rand(6))
    basis = torch.linalg.qr(rand(4, 2)).Q
    fwd = ForwardPass(stacked=stacked, input_projections={"w": Subspace(basis).tree()})
    out = ops.linear(x, w, b, fwd, "w")
    of_x, of_w, of_b = gradients(F.linear(x, w, b), [x, w, b])
    assert_all_close([out], [F.linear(x, w, b)])
    assert_all_close(gradients(out, [x, w, b]), [of_x, of_w - of_w @ basis @ basis.t(), of_b])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared", [(), (0,), (1, 2)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "channels", "side"),
    [(3, 1, 1, 2, 6), (3, 2, 1, 2, 7), (1, 2, 0, 3, 8), (4, 1, 0, 1, 9), (5, 1, 2, 16, 32)],
)
def test_stacked_convolution_equals_a_loop(
    bias: bool,
    shared: tuple[int, ...],
    kernel: int,
    stride: int,
    padding: int,
    channels: int,
    side: int,
) -> None:
    """Both ways of doing it: the last size is beyond what goes into one grouped convolution."""
    shapes = [(ROWS, channels, side, side), (8, channels, kernel, kernel), (8,)]
    full = [rand(CLIENTS, *shape) for shape in shapes]
    values = leaves(*(t[0] if i in shared else t for i, t in enumerate(full)))
    dims = tuple(None if i in shared else 0 for i in range(3))

    geometry = ConvGeometry((stride, stride), (padding, padding))

    def ours(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return ops.conv2d(x, w, b, ForwardPass(stacked=True), "w", geometry)

    def torchs(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.conv2d(x, w, b, stride, padding)

    check_stacked(ours, torchs, values, dims, bias)


GEOMETRIES = [
    ((3, 5), ConvGeometry((1, 2), (1, 2)), 2, 9),
    ((3, 3), ConvGeometry(padding=(2, 2), dilation=(2, 2), groups=2), 4, 8),
    ((3, 3), ConvGeometry((2, 1), (1, 0), groups=8), 8, 7),
    ((1, 1), ConvGeometry((2, 3), groups=2), 4, 9),
    ((5, 3), ConvGeometry(padding=(2, 1), groups=4), 16, 64),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [(), (0,), (1, 2)])
@pytest.mark.parametrize(("kernel", "geometry", "channels", "side"), GEOMETRIES)
def test_stacked_convolution_of_any_geometry_equals_a_loop(
    bias: bool,
    shared: tuple[int, ...],
    kernel: tuple[int, int],
    geometry: ConvGeometry,
    channels: int,
    side: int,
) -> None:
    """Unequal, dilated, grouped, depthwise and strided; the last one client by client."""
    shapes = [(ROWS, channels, side, side), (8, channels // geometry.groups, *kernel), (8,)]
    full = [rand(CLIENTS, *shape) for shape in shapes]
    values = leaves(*(t[0] if i in shared else t for i, t in enumerate(full)))
    dims = tuple(None if i in shared else 0 for i in range(3))

    def ours(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return ops.conv2d(x, w, b, ForwardPass(stacked=True), "w", geometry)

    def torchs(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return F.conv2d(x, w, b, *geometry.args)

    check_stacked(ours, torchs, values, dims, bias)
    x, w, b = (value[0] if i not in shared else value for i, value in enumerate(values))
    torch.testing.assert_close(ops.conv2d(x, w, b, ForwardPass(), "w", geometry), torchs(x, w, b))


def check_stacked(ours, torchs, values, dims, bias) -> None:  # type: ignore[no-untyped-def]
    """vmap of our function against a loop over clients with torch's, with gradients."""
    used = values if bias else values[:2]
    args = values if bias else [*values[:2], None]
    dims = dims if bias else (*dims[:2], None)
    if dims == (None, None, None):
        pytest.skip("nothing to stack")
    out = vmap(ours, in_dims=dims)(*args)
    loop = torch.stack(
        [
            torchs(
                *(a if a is None or d is None else a[k] for a, d in zip(args, dims, strict=True))
            )
            for k in range(CLIENTS)
        ]
    )
    torch.testing.assert_close(out, loop)
    assert_all_close(gradients(out, used), gradients(loop, used))


def test_gradients_inside_vmap_equal_a_loop() -> None:
    """vmap(grad(f)) goes another way through the functions than grad(vmap(f))."""
    x, w, b = rand(CLIENTS, ROWS, 1, 6, 6), rand(CLIENTS, 2, 1, 3, 3), rand(CLIENTS, 2)
    padded = ConvGeometry(padding=(1, 1))

    def loss(w: Tensor, b: Tensor, x: Tensor, stacked: bool) -> Tensor:
        out = ops.conv2d(x, w, b, ForwardPass(stacked=stacked), "w", padded).flatten(1)
        return (
            ops.linear(out, out.detach()[:4], None, ForwardPass(stacked=stacked), "v")
            .square()
            .sum()
        )

    ours = vmap(lambda w, b, x: grad(loss, (0, 1))(w, b, x, True))(w, b, x)
    loop = [grad(loss, (0, 1))(w[k], b[k], x[k], False) for k in range(CLIENTS)]
    assert_all_close(list(ours), [torch.stack(parts) for parts in zip(*loop, strict=True)])


def test_vmap_within_vmap_equals_loops() -> None:
    x, w, b = rand(2, CLIENTS, ROWS, 4), rand(2, CLIENTS, 6, 4), rand(2, CLIENTS, 6)
    out = vmap(vmap(lambda *args: ops.linear(*args, ForwardPass(stacked=True), "w")))(x, w, b)
    torch.testing.assert_close(out, torch.einsum("scri,scoi->scro", x, w) + b[:, :, None])


@pytest.mark.parametrize("side", [5, 8, 22, 32])
@pytest.mark.parametrize("channels", [3, 4])
def test_a_strided_1x1_convolution_is_exact_in_float32(side: int, channels: int) -> None:
    """The case in which torch's own gradient for channels-last images overruns its memory."""
    for repeat in range(5):
        x, w = leaves(
            rand(5, channels, side, side, seed=repeat).float(), rand(40, channels, 1, 1).float()
        )
        out = ops.conv2d(x, w, None, ForwardPass(), "w", ConvGeometry((2, 2)))
        theirs = torch.einsum("bchw,oc->bohw", x[:, :, ::2, ::2], w[:, :, 0, 0])
        torch.testing.assert_close(out, theirs, rtol=1e-4, atol=1e-5)
        upstream = torch.ones_like(out)
        our_grads = torch.autograd.grad(out, [x, w], upstream)
        other = torch.autograd.grad(theirs, [x, w], upstream)
        torch.testing.assert_close(our_grads, other, rtol=1e-4, atol=1e-3)


def test_layer_inputs_are_recorded() -> None:
    x, image = rand(ROWS, 4), rand(ROWS, 1, 5, 5)
    fwd = ForwardPass(layer_inputs={})
    ops.linear(x, rand(2, 4), None, fwd, "fc.weight")
    ops.conv2d(image, rand(2, 1, 3, 3), None, fwd, "conv.weight")
    assert fwd.layer_inputs is not None
    assert set(fwd.layer_inputs) == {"fc.weight", "conv.weight"}
    assert fwd.layer_inputs["fc.weight"] is x
    assert fwd.layer_inputs["conv.weight"] is image


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(2, 12), st.floats(0.1, 100), st.integers(0, 99))
def test_cross_entropy_equals_torch(rows: int, classes: int, scale: float, seed: int) -> None:
    logits = rand(rows, classes, seed=seed) * scale
    y = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(seed))
    expected = F.cross_entropy(logits, y, reduction="none")
    torch.testing.assert_close(ops.cross_entropy(logits, y), expected)


def test_cross_entropy_ignores_inactive_outputs() -> None:
    """Outputs at minus infinity take no part, in the loss or in its gradient."""
    logits = torch.tensor([[1.0, -torch.inf, 3.0]], requires_grad=True)
    loss = ops.cross_entropy(logits, torch.tensor([0])).sum()
    (gradient,) = torch.autograd.grad(loss, [logits])
    p = 1 / (1 + torch.e**2)
    torch.testing.assert_close(gradient, torch.tensor([[p - 1, 0.0, 1 - p]]))
