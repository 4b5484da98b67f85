"""A mechanism of privacy: what it does to uploads on clients and on the server, and says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from perdure.config import Config
from perdure.config.root import PrivacyConfig
from perdure.contract.context import Context
from perdure.contract.method import Method
from perdure.contract.uploads import CollectedUploads, StackedUploads, Upload, WeightBounds
from perdure.core.rng import Rng
from perdure.data.streams.stream import Stream

if TYPE_CHECKING:
    from perdure.privacy.accounting import RoundGroup
    from perdure.privacy.chain import OwnerPolicy
    from perdure.privacy.secure_sums import SecureSums


@runtime_checkable
class Masks(Protocol):
    """A client's side of a secure sum, which hides its uploads."""

    def upload(self, client: int, fields: Upload, weight: float) -> bytes:
        """Return a client's masked upload."""
        ...


@dataclass(frozen=True)
class Place:
    """An exchange of a run, as mechanisms see it on clients and on the server."""

    context: Context
    """The position in the run, and the draws that derive from the run's seed."""
    sampled: int
    """Number of clients that were asked."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Largest norms of fields of which the method knows them."""
    masks: Masks | None = None
    """On a node: its client in the secure sum of the exchange. If None, there is no such sum."""


class Released(Protocol):
    """What left the clients of a run so far, for the accounting of noise."""

    @property
    def groups(self) -> list[RoundGroup]:
        """The rounds and exchanges with uploads, by the numbers of clients and sampled ones."""
        ...

    @property
    def most_uploads(self) -> int:
        """The number of uploads of the client that sent the most."""
        ...


class Unmet(NamedTuple):
    """What the owner of a node asks for, and a run does not have."""

    key: str
    """Key of the policy."""
    name: str
    """Key of the config."""
    required: str
    """What its value must be."""
    value: object
    """Its value."""


class Mechanism:
    """One protection of uploads.

    A kind is a subclass, and a line in `MECHANISMS` (`perdure.privacy.chain`), whose order is that
    in which clients apply it; the server walks them backwards. Everything that simulations, nodes
    and the summary of a run do about it stands in the class.
    """

    key: ClassVar[str]
    """The key of the config's `privacy` section that turns it on."""
    keys: ClassVar[type[PrivacyConfig]]
    """The keys of the section that are its own, with defaults and checks."""
    draws: ClassVar[bool] = True
    """Whether uploads depend on draws that only the client knows, and so cannot be repeated."""
    hides_losses: ClassVar[bool] = True
    """Whether a client's training loss must not leave it in the clear."""
    hides_mean_loss: ClassVar[bool] = False
    """Whether not even the mean over clients may be recorded."""

    def __init__(self, config: Config, simulated: bool) -> None:
        """Make the mechanism of a run.

        Args:
            config: The config of the run.
            simulated: Whether draws derive from the run's seed, so that the run can be repeated. On
                real machines they come from the operating system, as nodes know the seed.

        """
        self.config, self.simulated = config, simulated
        self.privacy = config.privacy

    @property
    def is_on(self) -> bool:
        """Whether the config asks for it."""
        return bool(getattr(self.privacy, self.key))

    @property
    def sums(self) -> SecureSums | None:
        """The secure sums in which it has uploads collected, or None."""
        return None

    def check(self, method: Method, stream: Stream) -> None:
        """Refuse a run that it cannot protect.

        Raises:
            UserError: The method or the stream does not fit, or an extra is not installed.

        """

    def unmet(self, policy: OwnerPolicy) -> Unmet | None:
        """Return what the owner of a node asks for, also if it is off, and the run does not have"""
        return None

    def on_node(self, policy: OwnerPolicy) -> dict[str, Any]:
        """Return the keys of `privacy` that hold for the rows of a node."""
        return {}

    def connect(self, engine: object, rng: Rng) -> None:
        """Get to know where clients are: behind the engine, or in this process."""

    # ---- what it does to uploads

    def limit_rows(self, stream: Stream, is_whole: bool) -> Stream:
        """Return the stream with the rows about which something may be sent.

        Args:
            stream: The stream of the run.
            is_whole: Whether this process knows the rows of all clients, not of one alone.

        """
        return stream

    def limit_weights(self, bounds: WeightBounds, place: Place) -> WeightBounds:
        """Return the largest weights that uploads may have after it."""
        return bounds

    def on_clients(self, uploads: StackedUploads, place: Place) -> StackedUploads:
        """Return uploads as the clients change them before they leave."""
        return uploads

    def seal(self, client: int, fields: Upload, weight: float, place: Place) -> bytes | None:
        """Return a client's upload as bytes that hide it, or None if it leaves as it is."""
        return None

    def on_server(self, uploads: CollectedUploads, place: Place) -> CollectedUploads:
        """Return collected uploads as the server changes them before they are used."""
        return uploads

    def against_rules(self) -> str | None:
        """Return why no rule but the mean can combine updates, or None."""
        return None

    # ---- what is said about it

    def store_in(self, folder: Path) -> None:
        """Keep in a run directory what a restarted server must know."""

    @property
    def repeated_draws(self) -> int | None:
        """Times that the server drew noise again; None if it draws none."""
        return None

    def summary(self, released: Released) -> dict[str, Any]:
        """Return its keys of the section `privacy` of result.json, also if it is off."""
        return {}

    def spent(self, released: Released) -> dict[str, Any]:
        """Return the guarantee so far, or {} if it gives none."""
        return {}

    def logged(self) -> dict[str, Any]:
        """Return what a node's log says about every upload, also if it is off."""
        return {}

    @staticmethod
    def in_words(entry: Mapping[str, Any]) -> str | None:
        """Return how an upload was protected, by an entry of a node's log; None if it was not."""
        return None
