"""Protected spaces and projection of whole updates: convolutions, adaptive optimizers."""

from __future__ import annotations

import numpy as np
import torch
from subspace_runs import interference
from torch.nn import functional as F

from perdure.contract import ProjectOut
from perdure.contract.transforms import project_out_all
from perdure.methods.parts.protected_layers import (
    add_directions,
    layer_subspace,
    used_fraction,
)
from perdure.models.layers import conv_layer, linear_layer
from perdure.models.stacked import ConvGeometry

FC = linear_layer("fc", 6, 4)
CONV = conv_layer("conv.weight", (3, 2, 3, 3), ConvGeometry(padding=(1, 1)))


def spaces_of(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    spaces: dict[str, dict[str, torch.Tensor]] = {}
    spaces = add_directions(spaces, FC, torch.randn(6, rank))
    return add_directions(spaces, CONV, torch.randn(18, rank))


def test_projected_linear_change_by_numpy() -> None:
    columns = torch.randn(6, 2)
    spaces = add_directions({}, FC, columns)
    change = torch.randn(4, 6)
    basis = np.linalg.qr(columns.double().numpy())[0]
    expected = change.double().numpy() @ (np.eye(6) - basis @ basis.T)
    ours = project_out_all({"fc.weight": change}, spaces)["fc.weight"]
    np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_projected_convolution_ignores_protected_images() -> None:
    """A kernel's change, projected, gives zero on every patch of an image that was protected."""
    image = torch.randn(1, 2, 3, 3)
    patches = F.unfold(image, 3, padding=1)[0]
    spaces = add_directions({}, CONV, patches)
    change = project_out_all({"conv.weight": torch.randn(3, 2, 3, 3)}, spaces)["conv.weight"]
    assert float(F.conv2d(image, change, padding=1).abs().max()) < 1e-5
    assert float(F.conv2d(torch.randn(1, 2, 3, 3), change, padding=1).abs().max()) > 1e-2


def test_only_protected_names_change() -> None:
    change = {"fc.weight": torch.randn(4, 6), "fc.bias": torch.randn(4)}
    projected = project_out_all(change, spaces_of(2))
    assert projected["fc.bias"] is change["fc.bias"]
    assert not torch.equal(projected["fc.weight"], change["fc.weight"])


def test_projected_step_moves_by_the_projected_displacement() -> None:
    spaces = spaces_of(4)
    before = {"fc.weight": torch.randn(4, 6), "head.weight": torch.randn(2, 4)}
    after = {name: value + torch.randn(value.shape) for name, value in before.items()}
    done = ProjectOut(spaces).on_step(after, before, lr=0.1)
    assert torch.equal(done["head.weight"], after["head.weight"])
    moved = {"fc.weight": done["fc.weight"] - before["fc.weight"]}
    assert interference(moved, spaces) < 1e-5
    assert interference({"fc.weight": after["fc.weight"] - before["fc.weight"]}, spaces) > 0.1


def test_share_in_use() -> None:
    spaces = add_directions({}, FC, torch.randn(6, 2))
    assert used_fraction(spaces, (FC, CONV)) == {"fc.weight": 2 / 6, "conv.weight": 0.0}
    assert add_directions(spaces, FC, torch.zeros(6, 0)) is spaces
    full = add_directions(spaces, FC, torch.randn(6, 9))
    assert layer_subspace(full, FC).rank == 6
    assert project_out_all({"fc.weight": torch.randn(4, 6)}, full)["fc.weight"].abs().max() == 0
