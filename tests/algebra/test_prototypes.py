"""The prototypical network's loss against loops, differences and vmap."""

import numpy as np
import pytest
import torch

from perdure.algebra.coresets import prototypical_loss


def snell(z, y, real):
    """The loss in loops."""
    losses = []
    for i in range(len(z)):
        mates = [j for j in range(len(z)) if real[j] and y[j] == y[i] and j != i]
        if not real[i] or not mates:
            continue
        distance = {}
        for label in {int(y[j]) for j in range(len(z)) if real[j]}:
            ours = (
                mates if label == y[i] else [j for j in range(len(z)) if y[j] == label and real[j]]
            )
            distance[label] = ((z[i] - z[ours].mean(0)) ** 2).mean()
        total = np.log(sum(np.exp(-d) for d in distance.values()))
        losses.append(distance[int(y[i])] + total)
    return np.mean(losses) if losses else 0.0


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 1, 3], [0, 1, 1, 2, 2, 2], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("real", [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
def test_the_loss_equals_loops_over_rows(labels, real):
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    y = torch.tensor(labels)
    ours = prototypical_loss(z, y, torch.tensor(real, dtype=torch.float32), 7)
    assert float(ours) == pytest.approx(snell(z.double().numpy(), labels, real), abs=1e-5)
    if all(real):
        torch.testing.assert_close(prototypical_loss(z, y, None, 7), ours)


@pytest.mark.parametrize("labels", [[0, 0, 1, 1, 1, 3], [0, 1, 1, 2, 2, 2]])
def test_the_gradient_equals_finite_differences(labels):
    z = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    real = torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64)
    leaf = (3 * z).requires_grad_()
    (slope,) = torch.autograd.grad(prototypical_loss(leaf, torch.tensor(labels), real, 7), leaf)
    for i in range(6):
        for j in range(4):
            step = torch.zeros_like(z)
            step[i, j] = 1e-6
            up, down = (snell((3 * z + s).numpy(), labels, real) for s in (step, -step))
            assert float(slope[i, j]) == pytest.approx((up - down) / 2e-6, abs=1e-6)


def test_a_stack_gives_the_losses_of_its_clients():
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(3, 6, 4, generator=generator, requires_grad=True)
    y = torch.randint(0, 3, (3, 6), generator=generator)
    mask = (torch.rand(3, 6, generator=generator) > 0.2).float()
    stacked = torch.vmap(lambda z, y, m: prototypical_loss(z, y, m, 5))(z, y, mask)
    alone = torch.stack([prototypical_loss(z[i], y[i], mask[i], 5) for i in range(3)])
    torch.testing.assert_close(stacked, alone)
    weights = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(
        torch.autograd.grad((weights * stacked).sum(), z)[0],
        torch.autograd.grad((weights * alone).sum(), z)[0],
    )
