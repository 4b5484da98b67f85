"""What a config's `privacy` section does to a run: how uploads are collected.

The loop asks for a tally and adds to it what the engine yields; with nothing said under `privacy`
that is the plain tally, which sees every upload.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from perdure.config import Config
from perdure.contract.context import Context
from perdure.contract.engine import Engine
from perdure.contract.ledger import Ledger
from perdure.contract.method import Method
from perdure.contract.upload_collector import (
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    UploadCollector,
)
from perdure.core.errors import UserError, bad_value
from perdure.core.optional import require
from perdure.core.rng import Rng, SystemRng
from perdure.data.streams import Stream
from perdure.privacy.noise import ClipAndNoise
from perdure.privacy.secagg.transport import MIN_CLIENTS, SecAggTransport, min_survivors


@dataclass(frozen=True)
class PrivacyPolicy:
    """How the uploads of a run are collected."""

    config: Config
    transport: SecAggTransport | None = None
    """Who takes part in secure sums; None without them."""
    simulated: bool = True
    """Whether clients are simulated in this process, so that their part is done here too."""

    def collector(self, context: Context, clients: list[int], ledger: Ledger) -> UploadCollector:
        """For the uploads of these clients in one round or extra round."""
        if self.transport is None:
            return PlainUploadCollector(self, context, len(clients), ledger)
        from perdure.privacy.secure_collector import SecureUploadCollector

        collector = SecureUploadCollector(
            self.config.privacy, self.transport, context, clients, ledger
        )
        if self.simulated:
            collector.before = lambda uploads: self.protect(uploads, context, len(clients))
        return collector

    def protect(self, uploads: StackedUploads, context: Context, sampled: int) -> StackedUploads:
        """Uploads as they leave clients, one of `sampled` in a round: clipped and with noise.

        A node of a real federation does this itself; elsewhere the tally does it.
        """
        clip_and_noise = self.clip_and_noise(context, sampled)
        return uploads if clip_and_noise is None else clip_and_noise.on_clients(uploads, context)

    def context_of_noise(self, context: Context) -> Context:
        """Where noise is drawn: real nodes know the run's seed, so that it must not come from it.

        (A simulation draws from the seed all the same, for the sake of exact repetition.)
        """
        if self.simulated:
            return context
        return replace(context, rng=SystemRng())

    def clip_and_noise(self, context: Context, sampled: int) -> ClipAndNoise | None:
        """Clipping and noise of a round, if there are any."""
        said, training = self.config.privacy, context.exchange == 0
        if said.clip is None or not (training or said.extra_rounds):
            return None
        parts = None
        if said.mode == "local":
            parts = 1
        elif said.secagg:
            parts = min_survivors(sampled, said.threshold)
        return ClipAndNoise(said.clip, said.noise or 0.0, parts)


class PlainUploadCollector(UploadCollector):
    """A tally that sees every upload."""

    def __init__(
        self, privacy: PrivacyPolicy, context: Context, sampled: int, ledger: Ledger
    ) -> None:
        super().__init__()
        self._privacy, self._context, self._sampled = privacy, context, sampled
        self._ledger = ledger

    def add(self, uploads: StackedUploads | MaskedUpload | FailedUpload) -> None:
        """Count uploads and their bytes."""
        if isinstance(uploads, StackedUploads):
            if self._privacy.simulated:
                uploads = self._privacy.protect(uploads, self._context, self._sampled)
            self._ledger.receive(uploads)
        super().add(uploads)

    def close(self) -> None:
        """Add the server's noise, where it is the server that adds it."""
        clip_and_noise = self._privacy.clip_and_noise(self._context, self._sampled)
        if clip_and_noise is not None:
            context = self._privacy.context_of_noise(self._context)
            self.collected = clip_and_noise.on_server(self.collected, context)


def make_privacy(
    config: Config, method: Method, stream: Stream, engine: Engine, rng: Rng
) -> PrivacyPolicy:
    """Check what a config says under `privacy` against all the rest."""
    said, simulated = config.privacy, engine.in_process
    if not (said.secagg or said.clip):
        return PrivacyPolicy(config, simulated=simulated)
    _refuse_shown(config, method)
    if said.clip is not None:
        _check_noise(config)
    if not (simulated or isinstance(engine, SecAggTransport)):
        key = "secagg" if said.secagg else "clip"
        raise UserError(f"privacy.{key}: not there yet with engine.kind {config.engine.kind!r}")
    if not said.secagg:
        return PrivacyPolicy(config, simulated=simulated)
    require("cryptography", "privacy.secagg", "privacy")
    _check_numbers(config, method, stream)
    from perdure.privacy.secure_collector import SimulatedParticipants

    return PrivacyPolicy(
        config,
        engine if isinstance(engine, SecAggTransport) else SimulatedParticipants(rng),
        simulated,
    )


def _refuse_shown(config: Config, method: Method) -> None:
    shown = method.needs.per_client_fields
    if shown:
        key = "secagg" if config.privacy.secagg else "clip"
        raise UserError(
            f"privacy.{key}: got {getattr(config.privacy, key)!r}, allowed with methods that send "
            f"sums only, but {config.method['kind']!r} as it is set here must show the server each "
            f"client's {' and '.join(map(repr, shown))}"
        )


def _check_noise(config: Config) -> None:
    if config.train.weighting == "samples":
        raise bad_value("train.weighting", "samples", "uniform, since there is privacy.clip")
    if config.privacy.noise is not None:
        require("dp_accounting", "privacy.noise", "privacy")


def _check_numbers(config: Config, method: Method, stream: Stream) -> None:
    """Enough clients in every task, so that sums hide and dropouts can be borne."""
    if stream.agreed is not None:  # who holds data of later tasks is not known yet
        return
    for task in stream.tasks:
        there = int((task.partition.sizes > 0).sum())
        count = min(config.per_round, there)
        if count < MIN_CLIENTS:  # participants would refuse it
            raise UserError(
                f"privacy.secagg: got True, allowed with at least {MIN_CLIENTS} clients per "
                f"round, but task {task.index + 1} has {count} (clients.per_round, stream.presence)"
            )
        left = count - config.clients.max_dropouts(count)
        if left < min_survivors(count, config.privacy.threshold):
            needs = min_survivors(count, config.privacy.threshold)
            raise bad_value(
                "clients.dropout", config.clients.dropout,
                f"as many as leave {needs} of {count} clients, which privacy.threshold "
                f"{config.privacy.threshold} asks for",
            )  # fmt: skip
        _check_room(config, count, _largest_weight(config, method, int(task.partition.sizes.max())))


def _largest_weight(config: Config, method: Method, rows: int) -> int:
    """The largest weight with which a client of so many rows may report."""
    if config.privacy.clip is not None:
        return 1
    weighting = config.train.weighting or method.needs.weighting or "samples"
    own = rows if weighting == "samples" else 1
    return math.ceil(method.needs.max_client_weight * own)


def _check_room(config: Config, clients: int, weight: int) -> None:
    """A client's weight, which is a number of its row, must fit into its part of the range."""
    said = config.privacy
    most = said.bits - 1 - (clients * weight - 1).bit_length()
    if said.precision > most:
        raise bad_value(
            "privacy.precision", said.precision,
            f"at most {most} with privacy.bits {said.bits}, {clients} clients a round and weights "
            f"up to {weight}",
        )  # fmt: skip
