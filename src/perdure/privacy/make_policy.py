"""Make the privacy policy of a run, and refuse what cannot be protected."""

from __future__ import annotations

import math

from perdure.config import Config
from perdure.contract.engine import Engine
from perdure.contract.method import Method
from perdure.core.errors import UserError, bad_value
from perdure.core.optional import require
from perdure.core.rng import Rng
from perdure.data.streams import Stream
from perdure.privacy.policy import PrivacyPolicy
from perdure.privacy.secagg.transport import MIN_CLIENTS, SecAggTransport, min_survivors


def make_privacy(
    config: Config, method: Method, stream: Stream, engine: Engine, rng: Rng
) -> PrivacyPolicy:
    """Check the config's `privacy` section against everything else, and return its policy.

    Args:
        config: The whole config.
        method: The method, whose fields decide whether uploads can be summed securely.
        stream: The stream, whose tasks say how many clients hold data.
        engine: The engine. One that is not in this process must be a `SecAggTransport`.
        rng: Draws of the run, from which the keys of simulated clients derive.

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
    from perdure.privacy.simulated_clients import SimulatedSecAggClients

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
    weighting = config.train.weighting or method.needs.weighting or "samples"
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
