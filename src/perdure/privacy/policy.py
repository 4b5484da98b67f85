"""How a config's `privacy` section changes a run: the way in which uploads are collected.

The loop asks for one upload collector per exchange and adds what the engine yields to it. Without
secure aggregation that is the plain collector, which sees every upload.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from perdure.config import Config
from perdure.contract.client_weights import WeightBounds
from perdure.contract.context import Context
from perdure.contract.ledger import Ledger
from perdure.contract.upload_collector import (
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    UploadCollector,
)
from perdure.core.rng import SystemRng
from perdure.privacy.noise import ClipAndNoise
from perdure.privacy.noise_draws import NoiseDraws
from perdure.privacy.secagg.journal import StartedSum, SumJournal
from perdure.privacy.secagg.transport import SecAggTransport, min_survivors

NO_NORMS: Mapping[str, float] = MappingProxyType({})
"""Every field of an exchange is clipped to `privacy.clip`."""


@dataclass(frozen=True)
class PrivacyPolicy:
    """How the uploads of a run are collected, and what clients do to them before."""

    config: Config
    """The config of the run."""
    transport: SecAggTransport | None = None
    """The way to the clients of secure sums. If None, there is no secure aggregation."""
    simulated: bool = True
    """Whether clients are simulated in this process, so that their uploads are protected here."""
    sums: SumJournal = field(default_factory=SumJournal)
    """The secure sums that real clients were asked for."""
    draws: NoiseDraws = field(default_factory=NoiseDraws)
    """The noise that a real server drew."""

    @property
    def server_adds_noise(self) -> bool:
        """Whether a real server draws the noise, new every time."""
        is_central = self.config.privacy.mode == "central" and self.transport is None
        return is_central and bool(self.config.privacy.noise) and not self.simulated

    def started_sum(self, context: Context) -> StartedSum | None:
        """Return the sum of a round that was asked for before this process was started, or None."""
        return self.sums.at(context.position)

    def collector(
        self,
        context: Context,
        clients: list[int],
        ledger: Ledger,
        bounds: WeightBounds | None = None,
        norms: Mapping[str, float] = NO_NORMS,
        excluded: Collection[int] = (),
    ) -> UploadCollector:
        """Return a collector for one exchange.

        Args:
            context: The exchange.
            clients: Its participants, whether or not they will upload.
            ledger: Counts the bytes that travel.
            bounds: Largest weights of the participants. If None, sums of weights are not checked.
            norms: `clip_norms` of the exchange.
            excluded: Clients that uploaded to secure sums of earlier attempts at the exchange.
        """
        clip_and_noise = self.clip_and_noise(context, len(clients), norms)
        collector = self._collector(context, clients, ledger, bounds, clip_and_noise, excluded)
        collector.weight_cap = math.inf if bounds is None else bounds.cap
        return collector

    def _collector(
        self,
        context: Context,
        clients: list[int],
        ledger: Ledger,
        bounds: WeightBounds | None,
        clip_and_noise: ClipAndNoise | None,
        excluded: Collection[int],
    ) -> UploadCollector:
        if self.transport is None:
            return PlainUploadCollector(self, context, clip_and_noise, ledger)
        from perdure.privacy.secure_collector import SecureUploadCollector

        if bounds is not None and clip_and_noise is not None:
            bounds = bounds.with_equal_weights()
        journal = None if self.simulated else self.sums
        collector = SecureUploadCollector(
            self.config.privacy, self.transport, context, clients, ledger, bounds, journal, excluded
        )
        if clip_and_noise is not None:
            collector.note_noise = lambda sums: clip_and_noise.on_server(sums, context)
            if self.simulated:
                collector.protect = lambda uploads: clip_and_noise.on_clients(uploads, context)
        return collector

    def protect(
        self,
        uploads: StackedUploads,
        context: Context,
        sampled: int,
        norms: Mapping[str, float] = NO_NORMS,
    ) -> StackedUploads:
        """Return uploads as they leave clients: clipped and with noise, if the config says so.

        A node of a real federation calls this itself; in a simulation the collector does.

        Args:
            uploads: Uploads of one or more clients of the exchange.
            context: The exchange, whose `rng` draws the noise.
            sampled: Number of clients in the exchange.
            norms: `clip_norms` of the exchange.
        """
        clip_and_noise = self.clip_and_noise(context, sampled, norms)
        return uploads if clip_and_noise is None else clip_and_noise.on_clients(uploads, context)

    def noise_context(self, context: Context) -> Context:
        """Return the context to draw noise in.

        Nodes know the run's seed, so a real federation draws noise from the operating system. A
        simulation draws it from the seed, so that a run can be repeated exactly.
        """
        if self.simulated:
            return context
        return replace(context, rng=SystemRng())

    def clip_and_noise(
        self, context: Context, sampled: int, norms: Mapping[str, float] = NO_NORMS
    ) -> ClipAndNoise | None:
        """Return the clipping and noise of an exchange, or None if it has none.

        Args:
            context: The exchange.
            sampled: Number of clients in the exchange.
            norms: `clip_norms` of the exchange.
        """
        privacy, training = self.config.privacy, context.exchange == 0
        if privacy.clip is None or not (training or privacy.task_end):
            return None
        noise_shares = None
        if privacy.mode == "local":
            noise_shares = 1
        elif privacy.secagg:
            noise_shares = min_survivors(sampled, privacy.threshold)
        return ClipAndNoise(privacy.clip, privacy.noise or 0.0, noise_shares, norms)


class PlainUploadCollector(UploadCollector):
    """Collects uploads without secure aggregation: the server sees every upload."""

    def __init__(
        self,
        policy: PrivacyPolicy,
        context: Context,
        clip_and_noise: ClipAndNoise | None,
        ledger: Ledger,
    ) -> None:
        super().__init__()
        self._policy, self._context, self._ledger = policy, context, ledger
        self._clip_and_noise = clip_and_noise
        self.keeps_uploads = not policy.simulated  # other machines may send anything

    def add(self, uploads: StackedUploads | MaskedUpload | FailedUpload) -> None:
        """Add uploads, and count their bytes."""
        if isinstance(uploads, StackedUploads):
            if self._clip_and_noise is not None and self._policy.simulated:
                uploads = self._clip_and_noise.on_clients(uploads, self._context)
            self._ledger.count_uploads(uploads)
        super().add(uploads)

    def close(self) -> None:
        """Apply the rule of aggregation, and add the server's noise, if the server adds it."""
        super().close()
        if self._clip_and_noise is not None:
            if self._policy.server_adds_noise:
                self._policy.draws.add(self._context.position)
            context = self._policy.noise_context(self._context)
            self.collected = self._clip_and_noise.on_server(self.collected, context)
