"""Clip uploads and add Gaussian noise to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor

from perdure.config import Config
from perdure.config.root import PrivacyConfig
from perdure.config.section import OpenFraction, PositiveFloat
from perdure.contract.context import Context
from perdure.contract.method import Method
from perdure.contract.uploads import (
    CollectedUploads,
    Each,
    Field,
    StackedUploads,
    Sum,
    WeightBounds,
)
from perdure.core.errors import RunError, bad_value
from perdure.core.registry import require
from perdure.core.rng import SystemRng
from perdure.core.trees import Tensors
from perdure.data.streams.stream import Stream
from perdure.privacy.accounting import NoiseDraws, epsilon, sampled_epsilon
from perdure.privacy.mechanism import Mechanism, Place, Released, Unmet
from perdure.privacy.secagg.journal import min_survivors

if TYPE_CHECKING:
    from perdure.privacy.chain import OwnerPolicy

# ---- Clip uploads and add Gaussian noise to them
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


# ---- The mechanism of a run: which noise an exchange has, who draws it, and what it guarantees.

DRAWS_FILE = "draws.txt"
"""Name of the file in a run directory that says where the server drew noise."""


class NoiseKeys(PrivacyConfig):
    """The keys of `privacy` for clipping and noise."""

    clip: PositiveFloat | None = None
    """Maximum norm of each field of a client's upload; larger ones are scaled down. Fields whose
    bound the method knows have that one instead. If None, uploads are not clipped."""
    noise: PositiveFloat | None = None
    """Standard deviation of the Gaussian noise on a sum, as a multiple of `clip`; with k fields in
    an upload, sqrt(k) times as much on each. If None, no noise."""
    mode: Literal["central", "local"] = "central"
    """Noise once per sum (central; under secagg each client adds a part), or on every upload
    (local)."""
    delta: OpenFraction = 1e-5
    """Noise: the delta of the (epsilon, delta) guarantee."""
    task_end: bool = True
    """Clip and noise also the uploads of exchanges other than training."""

    @model_validator(mode="after")
    def _noise_needs_a_bound(self) -> NoiseKeys:
        if self.noise is not None and self.clip is None:
            raise ValueError("clip: must be a number, since privacy.noise is given, got None")
        return self


class GaussianNoise(Mechanism):
    """Every field of an upload is clipped, and Gaussian noise added to it or to the sum."""

    key = "clip"
    keys = NoiseKeys
    privacy: NoiseKeys
    hides_mean_loss = True

    def __init__(self, config: Config, simulated: bool) -> None:
        super().__init__(config, simulated)
        self.drawn = NoiseDraws()
        """The noise that a real server drew."""

    @property
    def server_draws(self) -> bool:
        """Whether a real server draws the noise, new every time."""
        privacy = self.privacy
        is_central = privacy.mode == "central" and not privacy.secagg
        return is_central and bool(privacy.noise) and not self.simulated

    def of(self, place: Place) -> ClipAndNoise | None:
        """Return the clipping and noise of an exchange, or None if it has none."""
        privacy, training = self.privacy, place.context.exchange == 0
        if privacy.clip is None or not (training or privacy.task_end):
            return None
        noise_shares = None
        if privacy.mode == "local":
            noise_shares = 1
        elif privacy.secagg:
            noise_shares = min_survivors(place.sampled, privacy.threshold)
        return ClipAndNoise(privacy.clip, privacy.noise or 0.0, noise_shares, place.norms)

    def check(self, method: Method, stream: Stream) -> None:
        """Refuse fields that noise does not hide, and weights that would tell about data."""
        privacy, names = self.privacy, method.needs.per_client_fields
        shown = f"the server each client's {' and '.join(map(repr, names))}"
        kind = self.config.method["kind"]
        reason = f"since method {kind!r} with these options must show {shown}"
        if names and privacy.mode == "central":
            local = " (privacy.mode local can protect it)" if names == ("update",) else ""
            raise bad_value("privacy.clip", privacy.clip, f"None, {reason}{local}")
        if set(names) - {"update"}:  # the shapes of other fields may depend on data: ranks, classes
            unbounded = f"{reason}, whose shapes noise does not hide"
            raise bad_value("privacy.clip", privacy.clip, f"None, {unbounded}")
        if self.config.train.weighting == "samples":
            raise bad_value("train.weighting", "samples", "uniform, since there is privacy.clip")
        if privacy.noise is not None:
            require("dp_accounting", "privacy.noise", "privacy")

    def unmet(self, policy: OwnerPolicy) -> Unmet | None:
        """Return that the noise is too small, or added only by the server, if it must not be."""
        privacy = self.privacy
        is_local = privacy.secagg or privacy.mode == "local"
        if not policy.min_noise or (
            is_local and privacy.task_end and (privacy.noise or 0.0) >= policy.min_noise
        ):
            return None
        required = f"at least {policy.min_noise:g}, with privacy.secagg or mode local"
        return Unmet("min_noise", "privacy.noise", required, privacy.noise)

    # ---- what it does to uploads

    def limit_weights(self, bounds: WeightBounds, place: Place) -> WeightBounds:
        """Return the bounds of clients that all have weight 1."""
        return bounds if self.of(place) is None else bounds.with_equal_weights()

    def on_clients(self, uploads: StackedUploads, place: Place) -> StackedUploads:
        """Return clipped uploads, with the clients' noise if they add it."""
        rule = self.of(place)
        return uploads if rule is None else rule.on_clients(uploads, self._draws_of(place))

    def on_server(self, uploads: CollectedUploads, place: Place) -> CollectedUploads:
        """Return uploads with the noise that the server adds, or that their sums have."""
        rule = self.of(place)
        if rule is None:
            return uploads
        if self.server_draws:
            self.drawn.add(place.context.position)
        return rule.on_server(uploads, self._draws_of(place))

    def against_rules(self) -> str | None:
        """Return why no rule but the mean can combine updates, or None."""
        hidden = self.privacy.mode == "central"
        return "privacy.clip with mode 'central' protects a sum of updates" if hidden else None

    def _draws_of(self, place: Place) -> Context:
        """Return the context to draw noise in.

        Nodes know the run's seed, so a real federation draws noise from the operating system. A
        simulation draws it from the seed, so that a run can be repeated exactly.
        """
        return place.context if self.simulated else replace(place.context, rng=SystemRng())

    # ---- what is said about it

    def store_in(self, folder: Path) -> None:
        """Keep in a run directory where the server drew noise."""
        self.drawn.store_in(folder / DRAWS_FILE)

    @property
    def repeated_draws(self) -> int | None:
        """Times that the server drew noise again; None if clients draw it, or nobody."""
        return self.drawn.repeated if self.server_draws else None

    def spent(self, released: Released) -> dict[str, Any]:
        """Return epsilon and delta so far, or {} if there is no noise."""
        privacy = self.privacy
        if privacy.noise is None:
            return {}
        # two uploads of a client differ by up to twice the bound, sums with and without one by once
        scale = privacy.noise / 2 if privacy.mode == "local" else privacy.noise
        level = epsilon(scale, released.most_uploads, privacy.delta)
        return {"epsilon": level, "delta": privacy.delta}

    def summary(self, released: Released) -> dict[str, Any]:
        """Return the settings, and the guarantee with its numbers."""
        privacy = self.privacy
        if not self.is_on:
            return {}
        settings = self._settings()
        if privacy.noise is None:
            claim = "uploads are clipped; without noise nothing is claimed"
            return {**settings, "epsilon": None, "claim": claim}
        groups = released.groups
        is_sampled = privacy.mode == "central" and any(g.sampled < g.clients for g in groups)
        values = {
            **settings,
            **self.spent(released),
            "epsilon_sampled": (
                sampled_epsilon(privacy.noise, groups, privacy.delta) if is_sampled else None
            ),
            "sums": sum(group.rounds for group in groups),
            "sums_of_one_client": released.most_uploads,
        }
        return {**values, "claim": self._claim(values)}

    def logged(self) -> dict[str, Any]:
        """Return the settings of every upload."""
        return self._settings() if self.is_on else {}

    @staticmethod
    def in_words(entry: Mapping[str, Any]) -> str | None:
        """Return the clipping and noise of an upload in a node's log, or None without clipping."""
        if entry.get("noise"):
            return f"clip {entry['clip']:g}, noise {entry['noise']:g}"
        return f"clip {entry['clip']:g}" if entry.get("clip") else None

    def _settings(self) -> dict[str, Any]:
        privacy = self.privacy
        return {"clip": privacy.clip, "noise": privacy.noise, "mode": privacy.mode}

    def _claim(self, values: Mapping[str, Any]) -> str:
        privacy = self.privacy
        unit = "any change of" if privacy.mode == "local" else "leaving out"
        text = (
            f"({values['epsilon']:.4g}, {privacy.delta:g})-differential privacy for {unit} "
            "everything that one client sent (not for single examples), at most "
            f"{values['sums_of_one_client']} uploads, by Renyi accounting; noise of "
            f"{privacy.noise:g} times the clipping norm of each field ({privacy.clip:g} unless the "
            "method knows its bound), times the square root of the number of an upload's fields, "
            f"was added by {self._source()}; "
        )
        if values["epsilon_sampled"] is not None:
            text += (
                f"{values['epsilon_sampled']:.4g} for replacing a client by another, against "
                "observers who do not know who was sampled (uniform samples without replacement); "
            )
        return text + self._not_covered()

    def _source(self) -> str:
        if self.privacy.mode == "local":
            return "each client to its upload, so the guarantee holds against the server too"
        if self.privacy.secagg:
            return (
                "the clients, a part of it each, so the guarantee holds against the server too if "
                "as many clients as the threshold keep their part secret"
            )
        return (
            "the server to the sum, so the guarantee holds against observers of the models but not "
            "against the server"
        )

    def _not_covered(self) -> str:
        """Return a sentence about everything that the guarantee does not cover."""
        released = ["the number of uploads", "tests on held-out data"]
        if not self.privacy.task_end:
            released.insert(0, "uploads of exchanges other than training")
        text = f"not covered: {', '.join(released)}"
        if self.simulated:
            return f"{text}; noise drawn from the run's seed is for simulation only"
        return text
