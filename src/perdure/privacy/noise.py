"""Clip uploads and add Gaussian noise to them, and the guarantee that this gives."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perdure.contract.context import Context
from perdure.contract.uploads import CollectedUploads, Each, Field, StackedUploads, Sum
from perdure.core.errors import RunError
from perdure.core.registry import require
from perdure.core.trees import Tensors

# ------------------------------------------------------------------------------------------------
# The guarantee of Gaussian noise: (epsilon, delta) by Renyi accounting, with dp-accounting.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundGroup:
    """Rounds with equal samples: `sampled` of `clients`, uniformly without replacement."""

    clients: int
    """Clients among which each round samples."""
    sampled: int
    """Clients sampled per round."""
    rounds: int
    """Number of such rounds."""


def epsilon(noise: float, releases: int, delta: float) -> float:
    """Return the epsilon of adding or removing one client.

    Nothing is assumed about which clients were sampled.
    """
    if releases == 0:
        return 0.0
    dp = require("dp_accounting", "privacy.noise", "privacy")
    event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(noise), releases)
    return _epsilon(dp, event, delta, "ADD_OR_REMOVE_ONE")


def sampled_epsilon(noise: float, groups: Iterable[RoundGroup], delta: float) -> float:
    """Return the epsilon of replacing one client by another, if the samples stay secret.

    dp-accounting's bound for samples without replacement is about replacement, which moves a sum by
    up to twice the norm of one upload; therefore `noise` is halved.
    """
    dp = require("dp_accounting", "privacy.noise", "privacy")
    event = dp.ComposedDpEvent([_event(dp, noise / 2, group) for group in groups])
    return _epsilon(dp, event, delta, "REPLACE_ONE")


def _event(dp: Any, noise: float, group: RoundGroup) -> Any:
    release = dp.GaussianDpEvent(noise)
    if group.sampled < group.clients:
        release = dp.SampledWithoutReplacementDpEvent(group.clients, group.sampled, release)
    return dp.SelfComposedDpEvent(release, group.rounds)


def _epsilon(dp: Any, event: Any, delta: float, relation: str) -> float:
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=getattr(dp.NeighboringRelation, relation))
    return float(accountant.compose(event).get_epsilon(delta))


# ------------------------------------------------------------------------------------------------
# The Gaussian mechanism on a sum over clients: clipping, and the noise that each client adds.
# ------------------------------------------------------------------------------------------------


def clip_norm(matrix: Tensor, limit: float) -> Tensor:
    """Return the matrix, scaled down to a Frobenius norm of at most `limit`."""
    norm = torch.linalg.vector_norm(matrix)
    factor: Tensor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
    return matrix * factor


def fot_sigma(epsilon: float, delta: float, clients: int) -> float:
    """Return the noise of one client as FOT's appendix H prints it.

    sigma^2 = log(1.25 / delta) / (epsilon^2 C) for C clients.
    """
    return math.sqrt(math.log(1.25 / delta) / clients) / epsilon


def gaussian_sigma(epsilon: float, delta: float, clients: int, sensitivity: float) -> float:
    """Return the noise of one client with which the sum over C clients is (epsilon, delta)-private.

    sigma_sum = sensitivity * sqrt(2 log(1.25 / delta)) / epsilon (Dwork and Roth 2014, theorem A.1,
    proved for epsilon < 1), divided by sqrt(C) because independent noises add up in variance.
    """
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta) / clients) / epsilon


# ------------------------------------------------------------------------------------------------
# Where a real server drew noise for sums, for the accounting.
#
# A server that resumes from a checkpoint repeats rounds. Nodes may have received the models that it
# made before, and the noise of the repeated sums is new: each draw is one more sum.
# ------------------------------------------------------------------------------------------------

Position = tuple[int, int, int]
"""Task, round and exchange."""


class NoiseDraws:
    """The draws of the server of one run; in memory, until `store_in` is called."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._drawn: list[str] = []

    def store_in(self, path: Path) -> None:
        """Read the draws of a file, to which all further ones are appended."""
        text = path.read_text("ascii", "replace") if path.is_file() else ""
        self._drawn = text.split("\n")[1:]  # every line begins with a line break
        self._path = path

    def add(self, position: Position) -> None:
        """Store a draw before its sum is used, and wait until it is on the disk."""
        line = " ".join(map(str, position))
        self._drawn.append(line)
        if self._path is None:
            return
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"\n{line}")  # begins a line even if a process died while it wrote one
            file.flush()
            os.fsync(file.fileno())

    @property
    def repeated(self) -> int:
        """The draws beyond one per round and exchange."""
        return len(self._drawn) - len(set(self._drawn))


# ------------------------------------------------------------------------------------------------
# Clip uploads and add Gaussian noise to them.
#
# Fields of an upload differ in scale: FOT's sketches are a hundred times longer than its fractions.
# Therefore each field f of a client's upload is scaled down apart, to a norm L_f: `clip`, or the
# bound that an exchange declares for the field (`clip_norms`), which is known before any data. They
# are accounted together: with k fields, each number of f gets noise of standard deviation
# noise * L_f * sqrt(k), so that in units of the noise one client moves the sums of all fields by
#
#     sqrt(sum_f (L_f / (noise * L_f * sqrt(k)))^2) = 1 / noise
#
# at most. This is one Gaussian mechanism with the noise multiplier `noise`, whatever k is; an
# upload of one field has noise * clip. The names and the number of the fields must not depend on
# data; they are not hidden. All clients have weight 1, because a weight would move a sum too.
#
#     central, plain    the server adds the noise to the sums; it sees the uploads without noise
#     central, secagg   each client adds a fraction of the noise, so the server never sees a sum
#                       without noise; the fraction is sized for the smallest set of clients with
#                       which the sum can be opened
#     local             every client adds the whole noise to its upload, so that the server may see
#                       it alone: fields may be per client (`Each`)
# ------------------------------------------------------------------------------------------------


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
        """Return collected uploads with the noise that their sums have, and how much it is."""
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
        """Return the standard deviation that the noise on a field's sum has at least."""
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
