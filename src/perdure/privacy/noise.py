"""Clip uploads and add Gaussian noise to them.

A client's upload, all its fields together, is scaled down to the norm `clip`. No client can then
move a sum by more than that, and noise of standard deviation `noise * clip` per number hides
whether a client took part. All clients have weight 1, because a weight would move the sum too.

    central, plain    the server adds the noise to the sum; it sees the uploads without noise
    central, secagg   each client adds a fraction of the noise, so the server never sees a sum
                      without noise; the fraction is sized for the smallest set of clients with
                      which the sum can be opened
    local             every client adds the whole noise to its upload
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perdure.contract.context import Context
from perdure.contract.upload_collector import StackedUploads
from perdure.contract.uploads import CollectedUploads, Each, Sum
from perdure.core.errors import RunError


@dataclass(frozen=True)
class ClipAndNoise:
    """Clipping and Gaussian noise of the uploads of one exchange.

    The noise is drawn from `context.rng`: the run's seed in a simulation, the operating system on
    the machines of a federation.
    """

    clip: float
    """Largest L2 norm of an upload, over all its fields."""
    noise: float
    """Standard deviation of the noise on a sum, as a multiple of `clip`. 0: clipping alone."""
    noise_shares: int | None
    """Number of clients whose noise adds up to that of a sum; 1 for local noise. If None, the
    server adds the noise."""

    def on_clients(self, uploads: StackedUploads, context: Context) -> StackedUploads:
        """Return uploads as they leave the clients: clipped, and with the clients' noise.

        Args:
            uploads: Uploads of one or more clients; every field must be a `Sum`.
            context: The exchange, which selects the draws.

        Returns:
            The uploads with weight 1 for every client and every field.

        Raises:
            RunError: A field is an `Each`, which clipping cannot bound.
        """
        clipped = self._clip(uploads)
        if not (self.noise and self.noise_shares):
            return clipped
        sigma = self.noise * self.clip / math.sqrt(self.noise_shares)
        generators = [
            context.rng.torch_generator("noise-of-client", *_position(context), client)
            for client in uploads.clients
        ]
        return _map_tensors(clipped, lambda stack: stack + _noise_rows(stack, sigma, generators))

    def on_server(self, uploads: CollectedUploads, context: Context) -> CollectedUploads:
        """Return collected uploads with the server's noise on their sums, if the server adds it."""
        if not self.noise or self.noise_shares or not uploads.clients:
            return uploads
        sigma = self.noise * self.clip
        generator = context.rng.torch_generator("noise-of-server", *_position(context))
        sums = {
            name: {key: total + _gaussian(total, sigma, generator) for key, total in values.items()}
            for name, values in uploads.sums.items()
        }
        return replace(uploads, sums=sums)

    def _clip(self, uploads: StackedUploads) -> StackedUploads:
        squares = torch.zeros(len(uploads.clients), dtype=torch.float64)
        for name, field in uploads.fields.items():
            if isinstance(field, Each):
                raise RunError(f"privacy.clip: cannot bound the field {name!r}, which is not a Sum")
            for tensor in field.value.values():
                squares += tensor.unsqueeze(-1).flatten(1).double().square().sum(1).cpu()
        factors = (self.clip / squares.sqrt().clamp(min=1e-300)).clamp(max=1.0)
        equal_weights = replace(uploads, weights=(1.0,) * len(uploads.clients))
        return _map_tensors(equal_weights, lambda t: _to_float(t) * _column(factors, t))


def _position(context: Context) -> tuple[int, int, int]:
    """Return the numbers that identify an exchange within a run."""
    return context.task, context.round, context.exchange


def _map_tensors(uploads: StackedUploads, change: Callable[[Tensor], Tensor]) -> StackedUploads:
    """Apply a function to all stacked tensors, and give every field weight 1."""
    fields = {
        name: Sum({key: change(tensor) for key, tensor in field.value.items()}, 1.0)
        for name, field in uploads.fields.items()
    }
    return replace(uploads, fields=fields)


def _noise_rows(stack: Tensor, sigma: float, generators: list[torch.Generator]) -> Tensor:
    """Return noise for a stack: one row per client, each from a separate generator."""
    return torch.stack([_gaussian(stack[0], sigma, generator) for generator in generators])


def _to_float(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _column(factors: Tensor, like: Tensor) -> Tensor:
    """Return one factor per client, shaped to multiply a stacked tensor."""
    shape = (-1,) + (1,) * (like.dim() - 1)
    return factors.to(like.device, _to_float(like).dtype).view(shape)


def _gaussian(like: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    return (sigma * torch.randn(like.shape, generator=generator)).to(like)
