"""How a config's `privacy` section changes a run: the way in which uploads are collected."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from perdure.config import Config
from perdure.contract.context import Context
from perdure.contract.method import Method
from perdure.contract.uploads import FailedUpload, MaskedUpload, StackedUploads, WeightBounds
from perdure.core.errors import UserError, bad_value
from perdure.core.registry import require
from perdure.core.rng import Rng, SystemRng
from perdure.data.streams.stream import Stream
from perdure.privacy.noise import ClipAndNoise, NoiseDraws
from perdure.privacy.secagg.journal import (
    MIN_CLIENTS,
    SecAggTransport,
    StartedSum,
    SumJournal,
    min_survivors,
)
from perdure.training.collector import UploadCollector
from perdure.training.engines.engine import Engine
from perdure.training.ledger import Ledger
from perdure.training.settings import choose_weighting

# ------------------------------------------------------------------------------------------------
# How a config's `privacy` section changes a run: the way in which uploads are collected.
#
# The loop asks for one upload collector per exchange and adds what the engine yields to it. Without
# secure aggregation that is the plain collector, which sees every upload.
# ------------------------------------------------------------------------------------------------

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
        """Return a collector for one exchange."""
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
        from perdure.training.secure_collector import SecureUploadCollector

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
        """Return the clipping and noise of an exchange, or None if it has none."""
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


# ------------------------------------------------------------------------------------------------
# Make the privacy policy of a run, and refuse what cannot be protected.
# ------------------------------------------------------------------------------------------------


def make_privacy(
    config: Config, method: Method, stream: Stream, engine: Engine, rng: Rng
) -> PrivacyPolicy:
    """Check the config's `privacy` section against everything else, and return its policy.

    Raises:
        UserError: The section does not fit the method, the stream or the engine.

    """
    privacy, simulated = config.privacy, engine.in_process
    if not (privacy.secagg or privacy.clip):
        return PrivacyPolicy(config, simulated=simulated)
    _check_fields(config, method)
    if privacy.clip is not None:
        _check_noise(config)
    if not (simulated or isinstance(engine, SecAggTransport)):
        key = "secagg" if privacy.secagg else "clip"
        raise UserError(f"privacy.{key}: not supported by engine.kind {config.engine.kind!r}")
    if not privacy.secagg:
        return PrivacyPolicy(config, simulated=simulated)
    require("cryptography", "privacy.secagg", "privacy")
    _check_client_counts(config, method, stream)
    from perdure.training.secure_collector import SimulatedSecAggClients

    return PrivacyPolicy(
        config,
        engine if isinstance(engine, SecAggTransport) else SimulatedSecAggClients(rng),
        simulated,
    )


def _check_fields(config: Config, method: Method) -> None:
    """Refuse methods that upload fields per client, if the server would see them unprotected."""
    names = method.needs.per_client_fields
    shown = f"the server each client's {' and '.join(map(repr, names))}"
    reason = f"since method {config.method['kind']!r} with these options must show {shown}"
    if names and config.privacy.secagg:
        raise bad_value("privacy.secagg", True, f"False, {reason}")
    if names and config.privacy.mode == "central":
        local = " (privacy.mode local can protect it)" if names == ("update",) else ""
        raise bad_value("privacy.clip", config.privacy.clip, f"None, {reason}{local}")
    if set(names) - {"update"}:  # the shapes of other fields may depend on data: ranks, classes
        unbounded = f"{reason}, whose shapes noise does not hide"
        raise bad_value("privacy.clip", config.privacy.clip, f"None, {unbounded}")


def _check_noise(config: Config) -> None:
    if config.train.weighting == "samples":
        raise bad_value("train.weighting", "samples", "uniform, since there is privacy.clip")
    if config.privacy.noise is not None:
        require("dp_accounting", "privacy.noise", "privacy")


def _check_client_counts(config: Config, method: Method, stream: Stream) -> None:
    """Check that every task has enough clients for sums that hide them and survive dropouts."""
    if stream.agreed is not None:  # the clients with data of later tasks are not known yet
        return
    for task in stream.tasks[: stream.known_tasks]:
        count = min(config.at(task.index).per_round, int((task.partition.sizes > 0).sum()))
        if count < MIN_CLIENTS:
            raise bad_value(
                "privacy.secagg", True,
                f"False, since a secure sum needs at least {MIN_CLIENTS} clients per round and "
                f"task {task.index + 1} has {count} (clients.per_round, stream.presence)",
            )  # fmt: skip
        _check_dropouts(config, count)
        largest = _largest_weight(config, method, int(task.partition.sizes.max()))
        _check_precision(config, count, largest)


def _check_dropouts(config: Config, count: int) -> None:
    needed = min_survivors(count, config.privacy.threshold)
    if count - config.clients.max_dropouts(count) < needed:
        raise bad_value(
            "clients.dropout", config.clients.dropout,
            f"small enough to leave {needed} of {count} clients, as privacy.threshold "
            f"{config.privacy.threshold} requires",
        )  # fmt: skip


def _largest_weight(config: Config, method: Method, examples: int) -> int:
    """Return the largest weight that a client with this many examples may upload with."""
    if config.privacy.clip is not None:
        return 1
    weighting = choose_weighting(config, method.needs)
    client_weight = examples if weighting == "samples" else 1
    return math.ceil(method.needs.max_client_weight * client_weight)


def _check_precision(config: Config, clients: int, weight: int) -> None:
    """Check that the sum of the clients' weights fits into the fixed-point range."""
    privacy = config.privacy
    largest = privacy.bits - 1 - (clients * weight - 1).bit_length()
    if privacy.precision > largest:
        raise bad_value(
            "privacy.precision", privacy.precision,
            f"at most {largest} with privacy.bits {privacy.bits}, {clients} clients per round and "
            f"weights up to {weight}",
        )  # fmt: skip
