"""The guarantee of Gaussian noise: (epsilon, delta) by Renyi accounting, with dp-accounting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from perdure.core.optional import require


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

    Args:
        noise: Standard deviation of the Gaussian noise on each sum, as a multiple of the largest
            change of the sum by one client.
        releases: Number of sums that include the client's uploads.
        delta: The delta for which epsilon is computed.
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

    Args:
        noise: As for `epsilon`.
        groups: The rounds, grouped by their sample sizes.
        delta: The delta for which epsilon is computed.
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
