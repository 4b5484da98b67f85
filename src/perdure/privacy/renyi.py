"""What noise guarantees: (epsilon, delta) by Renyi accounting, with Google's dp-accounting."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from perdure.core.optional import require


@dataclass(frozen=True)
class Rounds:
    """Rounds alike: a uniform sample without replacement of `sampled` out of `clients`."""

    clients: int
    sampled: int
    rounds: int


def epsilon(noise: float, releases: int, delta: float) -> float:
    """Of sums that one client moves by at most 1 each, with Gaussian noise of deviation `noise`.

    Nothing is assumed about who was sampled: `releases` are the sums that the client was part of.
    """
    if releases == 0:
        return 0.0
    dp = require("dp_accounting", "privacy.noise", "privacy")
    event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(noise), releases)
    return _epsilon(dp, event, delta, "ADD_OR_REMOVE_ONE")


def sampled_epsilon(noise: float, rounds: Iterable[Rounds], delta: float) -> float:
    """The same when nobody knows who was sampled, for replacing one client by another.

    dp-accounting's bound for samples without replacement is about replacement, which moves a sum by
    up to twice the norm of one upload: the noise counts half.
    """
    dp = require("dp_accounting", "privacy.noise", "privacy")
    event = dp.ComposedDpEvent([_event(dp, noise / 2, part) for part in rounds])
    return _epsilon(dp, event, delta, "REPLACE_ONE")


def _event(dp: Any, noise: float, part: Rounds) -> Any:
    release = dp.GaussianDpEvent(noise)
    if part.sampled < part.clients:
        release = dp.SampledWithoutReplacementDpEvent(part.clients, part.sampled, release)
    return dp.SelfComposedDpEvent(release, part.rounds)


def _epsilon(dp: Any, event: Any, delta: float, relation: str) -> float:
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=getattr(dp.NeighboringRelation, relation))
    return float(accountant.compose(event).get_epsilon(delta))
