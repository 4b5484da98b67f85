"""The chain of privacy of a run, which simulations, servers and nodes walk alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import create_model

from perdure.config import Config
from perdure.config.root import PrivacyConfig
from perdure.config.section import ConfigSection, NonNegativeFloat, NonNegativeInt, PositiveInt
from perdure.contract.method import Method
from perdure.contract.uploads import CollectedUploads, StackedUploads, Upload, WeightBounds
from perdure.core.registry import Registry
from perdure.core.rng import Rng
from perdure.data.streams.stream import Stream
from perdure.privacy.mechanism import Mechanism, Place, Released, Unmet
from perdure.privacy.min_rows import MIN_ROWS

if TYPE_CHECKING:
    from perdure.privacy.secure_sums import SecureSums

MECHANISMS: Registry[Mechanism] = Registry(
    key="privacy", base=Mechanism, base_name="perdure.privacy.mechanism.Mechanism",
    builtin={
        "min_rows": "perdure.privacy.min_rows.MinRows",
        "clip": "perdure.privacy.noise.GaussianNoise",
        "secagg": "perdure.privacy.secure_sums.SecureSums",
    },
)  # fmt: skip
"""All mechanisms by the key that turns them on, in the order in which clients apply them."""


def all_mechanisms() -> list[type[Mechanism]]:
    """Return the classes of all mechanisms in their order."""
    return [MECHANISMS.find(name) for name in MECHANISMS.names()]


def section_of(mechanisms: Iterable[type[Mechanism]]) -> type[PrivacyConfig]:
    """Return the section `privacy` of a config with the keys of mechanisms."""
    return create_model(
        "PrivacySection",
        __base__=tuple(mechanism.keys for mechanism in mechanisms),
        __doc__=PrivacyConfig.__doc__,
        __module__=__name__,
    )


PrivacySection = section_of(all_mechanisms())
"""The section `privacy` of a config: the keys of all mechanisms."""


class OwnerPolicy(ConfigSection):
    """What the owner of a node requires of the mechanisms of a run."""

    require_secagg: bool = False
    """Refuse runs without `privacy.secagg`."""
    min_clients: PositiveInt = 1
    """Refuse runs, and secure sums, of fewer clients."""
    min_rows: NonNegativeInt = MIN_ROWS
    """Send nothing about fewer rows: of a client, or of a class in statistics of classes."""
    min_noise: NonNegativeFloat = 0.0
    """Refuse runs whose `privacy.noise` is smaller, or whose server adds the noise itself."""


class PrivacyChain:
    """The mechanisms of a run in their order.

    Where clients are simulated in this process, the collector applies the clients' part, too.
    """

    def __init__(self, mechanisms: tuple[Mechanism, ...], simulated: bool = True) -> None:
        self.mechanisms = mechanisms
        """All mechanisms, also those that are off, which only say so."""
        self.simulated = simulated
        """Whether clients are simulated in this process."""
        self.active = tuple(mechanism for mechanism in mechanisms if mechanism.is_on)
        """The mechanisms that the config asks for. A run without any calls nothing of the chain."""
        self.sums: SecureSums | None = next(
            (each.sums for each in self.active if each.sums is not None), None
        )
        """The secure sums in which uploads are collected, or None if they are plain."""
        self.hides_mean_loss = any(mechanism.hides_mean_loss for mechanism in self.active)
        """Whether not even the mean training loss over clients may be recorded."""

    def prepare(self, method: Method, stream: Stream, engine: object, rng: Rng) -> None:
        """Refuse a run that a mechanism cannot protect, and reach the clients of the others.

        Raises:
            UserError: The section `privacy` does not fit the method or the stream.

        """
        for mechanism in reversed(self.active):
            mechanism.check(method, stream)
            mechanism.connect(engine, rng)

    def unmet(self, policy: OwnerPolicy) -> Unmet | None:
        """Return something that the owner of a node asks for and the run does not have, or None."""
        found = (mechanism.unmet(policy) for mechanism in reversed(self.mechanisms))
        return next((each for each in found if each is not None), None)

    def on_node(self, policy: OwnerPolicy) -> dict[str, Any]:
        """Return the keys of `privacy` that hold for the rows of a node."""
        return _joined(mechanism.on_node(policy) for mechanism in self.mechanisms)

    # ---- what it does to uploads

    def limit_rows(self, stream: Stream, is_whole: bool) -> Stream:
        """Return the stream with the rows about which something may be sent."""
        for mechanism in self.active:
            stream = mechanism.limit_rows(stream, is_whole)
        return stream

    def limit_weights(self, bounds: WeightBounds, place: Place) -> WeightBounds:
        """Return the largest weights that uploads may have."""
        for mechanism in self.active:
            bounds = mechanism.limit_weights(bounds, place)
        return bounds

    def on_clients(self, uploads: StackedUploads, place: Place) -> StackedUploads:
        """Return uploads as they leave the clients, but for what seals them."""
        for mechanism in self.active:
            uploads = mechanism.on_clients(uploads, place)
        return uploads

    def seal(self, client: int, fields: Upload, weight: float, place: Place) -> bytes | None:
        """Return a client's upload as bytes that hide it, or None if it leaves as it is."""
        sealed = (mechanism.seal(client, fields, weight, place) for mechanism in self.active)
        return next((data for data in sealed if data is not None), None)

    def on_server(self, uploads: CollectedUploads, place: Place) -> CollectedUploads:
        """Return collected uploads as they are used."""
        for mechanism in reversed(self.active):
            uploads = mechanism.on_server(uploads, place)
        return uploads

    def against_rules(self) -> list[str]:
        """Return why no rule but the mean can combine updates; empty if any can."""
        reasons = (mechanism.against_rules() for mechanism in reversed(self.active))
        return [reason for reason in reasons if reason is not None]

    @property
    def key(self) -> str | None:
        """The key of `privacy` that changes uploads, or None if they leave as they are."""
        return next((each.key for each in reversed(self.active) if each.draws), None)

    @property
    def draws(self) -> bool:
        """Whether uploads depend on draws that only the client knows."""
        return any(mechanism.draws for mechanism in self.active)

    @property
    def hides_losses(self) -> bool:
        """Whether a client's training loss must not leave it in the clear."""
        return any(mechanism.hides_losses for mechanism in self.active)

    # ---- what is said about it

    def store_in(self, folder: Path) -> None:
        """Keep in a run directory what a restarted server must know."""
        for mechanism in self.mechanisms:
            mechanism.store_in(folder)

    @property
    def repeated_draws(self) -> int | None:
        """Times that the server drew noise again; None if it draws none."""
        found = [mechanism.repeated_draws for mechanism in self.active]
        counts = [count for count in found if count is not None]
        return sum(counts) if counts else None

    def summary(self, released: Released) -> dict[str, Any] | None:
        """Return the section `privacy` of result.json, or None if uploads are not protected."""
        if not self.draws:
            return None
        return _joined(mechanism.summary(released) for mechanism in reversed(self.mechanisms))

    def spent(self, released: Released) -> dict[str, Any]:
        """Return epsilon and delta so far, or {} if there is no noise."""
        return _joined(mechanism.spent(released) for mechanism in self.active)

    def logged(self) -> dict[str, Any]:
        """Return what a node's log says about the protection of every upload."""
        return _joined(mechanism.logged() for mechanism in reversed(self.mechanisms))


def make_chain(config: Config, simulated: bool) -> PrivacyChain:
    """Return the chain of a run, on its server or a node, or of a simulation in this process."""
    return PrivacyChain(tuple(kind(config, simulated) for kind in all_mechanisms()), simulated)


def protection_of(entry: Mapping[str, Any]) -> str:
    """Return how an upload was protected, by an entry of a node's log, in words."""
    found = (mechanism.in_words(entry) for mechanism in reversed(all_mechanisms()))
    return ", ".join(words for words in found if words is not None) or "none"


def _joined(parts: Any) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}
