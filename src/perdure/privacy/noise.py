"""Clip uploads and add Gaussian noise to them.

Fields of an upload differ in scale: FOT's sketches are a hundred times longer than its fractions.
Therefore each field f of a client's upload is scaled down apart, to a norm L_f: `clip`, or the
bound that an exchange declares for the field (`clip_norms`), which is known before any data. They
are accounted together: with k fields, each number of f gets noise of standard deviation
noise * L_f * sqrt(k), so that in units of the noise one client moves the sums of all fields by

    sqrt(sum_f (L_f / (noise * L_f * sqrt(k)))^2) = 1 / noise

at most. This is one Gaussian mechanism with the noise multiplier `noise`, whatever k is; an upload
of one field has noise * clip. The names and the number of the fields must not depend on data; they
are not hidden. All clients have weight 1, because a weight would move a sum too.

    central, plain    the server adds the noise to the sums; it sees the uploads without noise
    central, secagg   each client adds a fraction of the noise, so the server never sees a sum
                      without noise; the fraction is sized for the smallest set of clients with
                      which the sum can be opened
    local             every client adds the whole noise to its upload, so that the server may see
                      it alone: fields may be per client (`Each`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from perdure.contract.context import Context
from perdure.contract.upload_collector import StackedUploads
from perdure.contract.uploads import CollectedUploads, Each, Field, Sum
from perdure.core.errors import RunError
from perdure.core.trees import Tensors


@dataclass(frozen=True)
class ClipAndNoise:
    """Clipping and Gaussian noise of the uploads of one exchange.

    The noise is drawn from `context.rng`: the run's seed in a simulation, the operating system on
    the machines of a federation.
    """

    clip: float
    """Largest L2 norm of a field of an upload."""
    noise: float
    """Standard deviation of the noise on the sum of an upload of one field, as a multiple of its
    norm. 0: clipping alone."""
    noise_shares: int | None
    """Number of clients whose noise adds up to that of a sum; 1 for local noise. If None, the
    server adds the noise."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Largest norms of fields that have another one than `clip`, by name."""

    def on_clients(self, uploads: StackedUploads, context: Context) -> StackedUploads:
        """Return uploads as they leave the clients: clipped, and with the clients' noise.

        Args:
            uploads: Uploads of one or more clients; unless noise is local, every field must be a
                `Sum`.
            context: The exchange, which selects the draws.

        Returns:
            The uploads with weight 1 for every client and every field.

        Raises:
            RunError: A field is an `Each`, and the server would see it without noise.
        """
        self._refuse_shown(uploads)
        weights = (1.0,) * len(uploads.clients)
        clipped = _map_fields(replace(uploads, weights=weights), self._clip)
        if not (self.noise and self.noise_shares):
            return clipped
        generators = [
            context.rng.torch_generator("noise-of-client", *_position(context), client)
            for client in uploads.clients
        ]

        def add_noise(name: str, values: Tensors) -> Tensors:
            sigma = self._client_sigma(name, len(uploads.fields))
            return {key: t + _noise_rows(t, sigma, generators) for key, t in values.items()}

        return _map_fields(clipped, add_noise)

    def on_server(self, uploads: CollectedUploads, context: Context) -> CollectedUploads:
        """Return collected uploads with the noise that their sums have, and how much it is.

        Args:
            uploads: The sums of the clients' uploads, to which noise is added if the server does.
            context: The exchange, which selects the draws.
        """
        if not self.noise or not uploads.clients:
            return uploads
        sigmas = {name: self.sum_sigma(name, uploads) for name in uploads.sums}
        if self.noise_shares:
            return replace(uploads, noise=sigmas)
        generator = context.rng.torch_generator("noise-of-server", *_position(context))
        sums = {
            name: {k: total + _gaussian(total, sigmas[name], generator) for k, total in v.items()}
            for name, v in uploads.sums.items()
        }
        return replace(uploads, sums=sums, noise=sigmas)

    def sigma(self, name: str, fields: int) -> float:
        """Return the standard deviation that the noise on a field's sum has at least.

        Args:
            name: The field.
            fields: Number of fields of the upload.
        """
        return self.noise * self.norm(name) * math.sqrt(fields)

    def sum_sigma(self, name: str, uploads: CollectedUploads) -> float:
        """Return the standard deviation of the noise on the sum of a field."""
        fields = len(uploads.sums) + len(uploads.per_client)
        if self.noise_shares is None:
            return self.sigma(name, fields)
        return self._client_sigma(name, fields) * math.sqrt(len(uploads.clients))

    def norm(self, name: str) -> float:
        """Return the largest norm of a field."""
        return self.norms.get(name, self.clip)

    def _client_sigma(self, name: str, fields: int) -> float:
        return self.sigma(name, fields) / math.sqrt(self.noise_shares or 1)

    def _clip(self, name: str, values: Tensors) -> Tensors:
        """Return the stacked tensors of one field, each client's scaled down to the norm."""
        factors = (self.norm(name) / _norms(values).clamp(min=1e-300)).clamp(max=1.0)
        return {key: _to_float(t) * _column(factors, t) for key, t in values.items()}

    def _refuse_shown(self, uploads: StackedUploads) -> None:
        shown = [name for name, part in uploads.fields.items() if isinstance(part, Each)]
        if shown and self.noise_shares != 1:
            raise RunError(f"privacy.clip: cannot bound the field {shown[0]!r}, which is not a Sum")


def _position(context: Context) -> tuple[int, int, int]:
    """Return the numbers that identify an exchange within a run."""
    return context.task, context.round, context.exchange


def _map_fields(
    uploads: StackedUploads, change: Callable[[str, Tensors], Tensors]
) -> StackedUploads:
    """Apply a function to the stacked tensors of each field, and give every Sum weight 1."""
    fields: dict[str, Field] = {}
    for name, part in uploads.fields.items():
        value = change(name, dict(part.value))
        fields[name] = Each(value) if isinstance(part, Each) else Sum(value, 1.0)
    return replace(uploads, fields=fields)


def _norms(values: Tensors) -> Tensor:
    """Return each client's norm over all stacked tensors of a field, double [clients]."""
    rows = (t.unsqueeze(-1).flatten(1).double().square().sum(1).cpu() for t in values.values())
    return sum(rows, torch.zeros(1, dtype=torch.float64)).sqrt()


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
