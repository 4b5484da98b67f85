"""Secure sums as a mechanism of a run: the server learns sums of uploads and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from perdure.config import Config
from perdure.config.root import PrivacyConfig
from perdure.config.section import NOT_BOOL, PositiveInt
from perdure.contract.context import Context
from perdure.contract.method import Method
from perdure.contract.uploads import Each, StackedUploads, Upload, WeightBounds
from perdure.core.errors import RunError, bad_value
from perdure.core.registry import require
from perdure.core.rng import Rng
from perdure.data.streams.stream import Stream
from perdure.privacy.mechanism import Masks, Mechanism, Place, Released, Unmet
from perdure.privacy.secagg.journal import (
    MIN_CLIENTS,
    SecAggTransport,
    StartedSum,
    SumJournal,
    min_survivors,
)
from perdure.privacy.secagg.layout import FixedPoint
from perdure.privacy.secagg.messages import (
    DropoutRequest,
    Session,
    SumRequest,
    UnmaskRequest,
    decode,
    decode_either,
)

if TYPE_CHECKING:
    from perdure.privacy.chain import OwnerPolicy

JOURNAL_FILE = "sums.jsonl"
"""Name of the file in a run directory with the secure sums that nodes were asked for."""


class SecureSumsKeys(PrivacyConfig):
    """The keys of `privacy` for secure aggregation."""

    secagg: bool = False
    """Secure aggregation: the server learns sums and nothing of a single client."""
    threshold: Annotated[float, Field(gt=0.5, le=1, allow_inf_nan=False), NOT_BOOL] = 0.66
    """Secagg: fraction of a round's clients that must be left for its sum to be opened."""
    bits: Annotated[Literal[32, 64], NOT_BOOL] = 64
    """Secagg: bits per number of a masked upload. 32 halves the bytes and needs a smaller
    `precision`."""
    precision: Annotated[int, Field(ge=0, le=52), NOT_BOOL] = 30
    """Secagg: values times weights are rounded to multiples of 2^-precision."""
    single_message: bool = True
    """Secagg: a round without dropouts takes one message per client. If false, it always takes two,
    and the server cannot gain by lying about dropouts."""
    attempts: PositiveInt = 3
    """Secagg: attempts at a round before the run stops. No client takes part in two sums of a
    round: another attempt has other clients, or waits for those that are missing."""


class SecureSums(Mechanism):
    """Clients mask their uploads so that the server can open nothing but sums over many of them."""

    key = "secagg"
    keys = SecureSumsKeys
    privacy: SecureSumsKeys

    def __init__(self, config: Config, simulated: bool) -> None:
        super().__init__(config, simulated)
        self.transport: SecAggTransport | None = None
        """The server's way to the clients of a sum. If None, it has no use for one."""
        self._journal = SumJournal()

    @property
    def sums(self) -> SecureSums:
        """The secure sums themselves."""
        return self

    def connect(self, engine: object, rng: Rng) -> None:
        """Reach the nodes behind an engine, or in a simulation clients in this process."""
        if isinstance(engine, SecAggTransport):
            self.transport = engine
        else:
            from perdure.privacy.secagg.client import SimulatedSecAggClients

            self.transport = SimulatedSecAggClients(rng)

    def check(self, method: Method, stream: Stream) -> None:
        """Refuse fields that are not summed, and rounds with too few clients for a sum."""
        names, kind = method.needs.per_client_fields, self.config.method["kind"]
        if names:
            shown = f"the server each client's {' and '.join(map(repr, names))}"
            reason = f"since method {kind!r} with these options must show {shown}"
            raise bad_value("privacy.secagg", True, f"False, {reason}")
        require("cryptography", "privacy.secagg", "privacy")
        if stream.agreed is None:  # else the clients with data of later tasks are not known yet
            for task in stream.tasks[: stream.known_tasks]:
                sizes = task.partition.sizes
                count = min(self.config.at(task.index).per_round, int((sizes > 0).sum()))
                self._check_count(count, task.index)
                self._check_precision(count, self._largest_weight(method, int(sizes.max())))

    def _check_count(self, count: int, task: int) -> None:
        """Check that a task has enough clients for sums that hide them and survive dropouts."""
        clients, privacy = self.config.clients, self.privacy
        if count < MIN_CLIENTS:
            raise bad_value(
                "privacy.secagg", True,
                f"False, since a secure sum needs at least {MIN_CLIENTS} clients per round and "
                f"task {task + 1} has {count} (clients.per_round, stream.presence)",
            )  # fmt: skip
        needed = min_survivors(count, privacy.threshold)
        if count - clients.max_dropouts(count) < needed:
            raise bad_value(
                "clients.dropout", clients.dropout,
                f"small enough to leave {needed} of {count} clients, as privacy.threshold "
                f"{privacy.threshold} requires",
            )  # fmt: skip

    def _check_precision(self, clients: int, weight: int) -> None:
        """Check that the sum of the clients' weights fits into the fixed-point range."""
        privacy = self.privacy
        largest = privacy.bits - 1 - (clients * weight - 1).bit_length()
        if privacy.precision > largest:
            raise bad_value(
                "privacy.precision", privacy.precision,
                f"at most {largest} with privacy.bits {privacy.bits}, {clients} clients per round "
                f"and weights up to {weight}",
            )  # fmt: skip

    def _largest_weight(self, method: Method, examples: int) -> int:
        """Return the largest weight that a client with this many examples may upload with."""
        if self.privacy.clip is not None:
            return 1
        preferred = "uniform" if method.needs.prefers.weighting == "uniform" else "samples"
        weighting = self.config.train.weighting or preferred
        client_weight = examples if weighting == "samples" else 1
        return math.ceil(method.needs.max_client_weight * client_weight)

    def unmet(self, policy: OwnerPolicy) -> Unmet | None:
        """Return that there are no secure sums, or too few clients."""
        count = self.config.clients.count
        if policy.require_secagg and not self.is_on:
            return Unmet("require_secagg", "privacy.secagg", "true", False)
        if count < policy.min_clients:
            required = f"at least {policy.min_clients}"
            return Unmet("min_clients", "clients.count", required, count)
        return None

    # ---- what it does to uploads

    def on_clients(self, uploads: StackedUploads, place: Place) -> StackedUploads:
        """Refuse fields that masks cannot hide."""
        for name, field in uploads.fields.items():
            if isinstance(field, Each):
                raise RunError(
                    f"privacy.secagg: the method sends the field {name!r} as Each, "
                    "which secure aggregation cannot hide; its Needs.per_client_fields do not name "
                    "it"
                )
        return uploads

    def seal(self, client: int, fields: Upload, weight: float, place: Place) -> bytes:
        """Return a client's masked upload."""
        masks = place.masks or self.transport
        if not isinstance(masks, Masks):
            raise RunError("privacy.secagg: the engine passed on uploads that are not masked")
        return masks.upload(client, fields, weight)

    def against_rules(self) -> str | None:
        """Return why no rule but the mean can combine updates, or None."""
        return "privacy.secagg shows the server no client's update"

    # ---- sums that the server asks for

    @property
    def journal(self) -> SumJournal:
        """The sums that nodes were asked for; a simulation, which starts again, keeps none."""
        return SumJournal() if self.simulated else self._journal

    def started(self, context: Context) -> StartedSum | None:
        """Return the sum of a round that was asked for before this process was started, or None."""
        return self.journal.at(context.position)

    def request(
        self,
        context: Context,
        public_keys: dict[int, bytes],
        sampled: int,
        bounds: WeightBounds | None,
    ) -> SumRequest:
        """Return the request for the sum of one exchange.

        The threshold refers to all sampled clients. If too few of them have a key, the clients
        refuse the request.
        """
        privacy, position = self.privacy, context.position
        nonce = f"{context.rng.key('secagg-call', *position):016x}"
        return SumRequest(
            Session(*position, context.attempt, nonce),
            public_keys,
            min_survivors(sampled, privacy.threshold),
            FixedPoint(privacy.bits, privacy.precision, max(1, len(public_keys))),
            privacy.single_message,
            bounds.cap if bounds is not None and bounds.cap < math.inf else None,
        )

    # ---- requests that a node receives

    def check_request(
        self, data: bytes, position: tuple[int, int, int], min_clients: int
    ) -> SumRequest:
        """Return a request for a sum, which must be the one that the accepted config asks for.

        Raises:
            ValueError: The sum differs from the config in its place, its format or its clients.

        """
        try:
            wanted = decode(data, SumRequest)
        except ValueError as error:
            raise ValueError(f"sum request: {error}") from None
        privacy, count, form = self.privacy, len(wanted.public_keys), wanted.fixed_point
        if wanted.session.position != position:
            raise ValueError("sum request: it belongs to another round or exchange")
        got = (form.bits, form.precision, wanted.single_message)
        if got != (privacy.bits, privacy.precision, privacy.single_message):
            raise ValueError(
                "sum request: bits, precision and single_message must be those of the config, "
                f"got {got}"
            )
        if form.clients != count:  # it decides which values are too large to be sent
            raise ValueError(
                f"sum request: the format must be for {count} clients, got {form.clients}"
            )
        clients, least = self.config.clients.count, min_survivors(count, privacy.threshold)
        if not all(0 <= client < clients for client in wanted.public_keys):
            raise ValueError(f"sum request: clients must be below {clients}")
        if count < min_clients or wanted.threshold < least:
            raise ValueError(
                f"sum request: must need at least {least} of at least {min_clients} clients, got "
                f"{wanted.threshold} of {count}"
            )
        cap = wanted.weight_cap
        if cap is not None and (cap < 1 or self.config.federation is None):
            expected = "at least 1, in a federation with local data"
            raise ValueError(f"sum request: weight_cap: must be {expected}, got {cap:g}")
        return wanted

    # ---- what is said about it

    def store_in(self, folder: Path) -> None:
        """Keep in a run directory the sums that nodes were asked for."""
        self._journal.store_in(folder / JOURNAL_FILE)

    def summary(self, released: Released) -> dict[str, Any]:
        """Return the settings, and what the server learned."""
        privacy = self.privacy
        if not self.is_on:
            return {"secagg": False}
        return {
            "secagg": True, "threshold": privacy.threshold, "bits": privacy.bits,
            "precision": privacy.precision, "single_message": privacy.single_message,
            "covers": self._covers(),
        }  # fmt: skip

    def logged(self) -> dict[str, Any]:
        """Return whether every upload was masked."""
        return {"masked": self.is_on}

    @staticmethod
    def in_words(entry: Mapping[str, Any]) -> str | None:
        """Return that an upload in a node's log was masked, or None."""
        return "masked" if entry.get("masked") else None

    def _covers(self) -> str:
        privacy, sampled = self.privacy, self.config.per_round
        simulated = ""
        if self.simulated:
            simulated = "; all of it in a simulation, whose keys derive from the run's seed"
        late = ""
        if privacy.single_message:
            late = " and not to use uploads that arrive after their round"
        least = min_survivors(sampled, privacy.threshold)
        fewer = f" (fewer, but at least {MIN_CLIENTS}, if fewer have data of the task)"
        return (
            "secure aggregation: the server learned which clients took part, which declined, and "
            f"sums of uploads, each over at least {least} of {sampled} sampled clients"
            f"{fewer if least > MIN_CLIENTS else ''}; the server is assumed to follow "
            f"the protocol and to collude with fewer clients than the threshold{late}{simulated}"
        )


def count_survivors(data: bytes) -> int:
    """Return how many clients are left in a sum, by a request to open it.

    Raises:
        ValueError: It is no such request.

    """
    try:
        return len(set(decode_either(data, DropoutRequest, UnmaskRequest).survivors))
    except ValueError as error:
        raise ValueError(f"secure sum: {error}") from None
