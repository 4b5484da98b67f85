"""Clipping and Gaussian noise on what clients send.

A client's upload, all its fields together, is scaled down to the norm `clip`; then nobody can move
a sum by more than that, and noise of `noise * clip` a number hides whether somebody took part. All
clients weigh the same, because a weight would move the sum too.

    central, plain    the server adds the noise to the sum, and sees everything before
    central, secagg   each client adds its part, so that the server never sees a sum without noise;
                      a part is sized for the fewest clients with which the sum can be opened
    local             every client adds the whole noise to its own upload
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
    """Clipping, and noise where there is any. Draws derive from the run's seed: a simulation."""

    clip: float
    noise: float
    """Multiple of clip; 0: clipping alone."""
    parts: int | None
    """Central noise: clients that share in adding it, or None: the server adds it. Local: 1."""

    def on_clients(self, uploads: StackedUploads, context: Context) -> StackedUploads:
        """The uploads as they leave the clients."""
        clipped = self._clipped(uploads)
        if not (self.noise and self.parts):
            return clipped
        sigma = self.noise * self.clip / math.sqrt(self.parts)
        sources = [
            context.rng.torch_generator("noise-of-client", *_position(context), client)
            for client in uploads.clients
        ]
        return _mapped(clipped, lambda stack: stack + _rows(stack, sigma, sources))

    def on_server(self, uploads: CollectedUploads, context: Context) -> CollectedUploads:
        """The sums as the server goes on with them."""
        if not self.noise or self.parts or not uploads.clients:
            return uploads
        sigma = self.noise * self.clip
        source = context.rng.torch_generator("noise-of-server", *_position(context))
        sums = {
            name: {key: total + _gauss(total, sigma, source) for key, total in values.items()}
            for name, values in uploads.sums.items()
        }
        return replace(uploads, sums=sums)

    def _clipped(self, uploads: StackedUploads) -> StackedUploads:
        squares = torch.zeros(len(uploads.clients), dtype=torch.float64)
        for name, part in uploads.fields.items():
            if isinstance(part, Each):
                raise RunError(f"privacy.clip: the field {name!r} is not a sum, and has no bound")
            for tensor in part.value.values():
                squares += tensor.unsqueeze(-1).flatten(1).double().square().sum(1).cpu()
        factors = (self.clip / squares.sqrt().clamp(min=1e-300)).clamp(max=1.0)
        even = replace(uploads, weights=(1.0,) * len(uploads.clients))
        return _mapped(even, lambda t: _float(t) * _column(factors, t))


def _position(context: Context) -> tuple[int, int, int]:
    """What tells one exchange of a run from all others."""
    return context.task, context.round, context.exchange


def _mapped(uploads: StackedUploads, change: Callable[[Tensor], Tensor]) -> StackedUploads:
    """All tensors changed by a function of a stack; every field weighs 1, whoever sends it."""
    fields = {
        name: Sum({key: change(tensor) for key, tensor in part.value.items()}, 1.0)
        for name, part in uploads.fields.items()
    }
    return replace(uploads, fields=fields)


def _rows(stack: Tensor, sigma: float, sources: list[torch.Generator]) -> Tensor:
    """Noise for each client of a stack, from a source of its own."""
    return torch.stack([_gauss(stack[0], sigma, source) for source in sources])


def _float(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _column(factors: Tensor, like: Tensor) -> Tensor:
    """One factor a client, shaped to multiply a stacked tensor."""
    shape = (-1,) + (1,) * (like.dim() - 1)
    return factors.to(like.device, _float(like).dtype).view(shape)


def _gauss(like: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    return (sigma * torch.randn(like.shape, generator=generator)).to(like)
