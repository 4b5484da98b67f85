"""The guarantee that Gaussian noise gives, the noise for a guarantee, and repeated draws."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perdure.core.registry import require

# ---- The guarantee of Gaussian noise: (epsilon, delta) by Renyi accounting, with dp-accounting.


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


# ---- The Gaussian mechanism on a sum over clients: clipping, and the noise that each client adds.


def clip_norm(matrix: Tensor, limit: float) -> Tensor:
    """Return the matrix, scaled down to a Frobenius norm of at most `limit`."""
    norm = torch.linalg.vector_norm(matrix)
    factor: Tensor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
    return matrix * factor


def fot_sigma(epsilon: float, delta: float, clients: int) -> float:
    """Return the noise of one client as FOT's appendix H prints it.

    sigma^2 = log(1.25 / delta) / (epsilon^2 C) for C clients.
    """
    return math.sqrt(math.log(1.25 / delta) / clients) / epsilon


def gaussian_sigma(epsilon: float, delta: float, clients: int, sensitivity: float) -> float:
    """Return the noise of one client with which the sum over C clients is (epsilon, delta)-private.

    sigma_sum = sensitivity * sqrt(2 log(1.25 / delta)) / epsilon (Dwork and Roth 2014, theorem A.1,
    proved for epsilon < 1), divided by sqrt(C) because independent noises add up in variance.
    """
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta) / clients) / epsilon


# ---- Where a real server drew noise for sums, for the accounting
#
# A server that resumes from a checkpoint repeats rounds. Nodes may have received the models that it
# made before, and the noise of the repeated sums is new: each draw is one more sum.

Position = tuple[int, int, int]
"""Task, round and exchange."""


class NoiseDraws:
    """The draws of the server of one run; in memory, until `store_in` is called."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._drawn: list[str] = []

    def store_in(self, path: Path) -> None:
        """Read the draws of a file, to which all further ones are appended."""
        text = path.read_text("ascii", "replace") if path.is_file() else ""
        self._drawn = text.split("\n")[1:]  # every line begins with a line break
        self._path = path

    def add(self, position: Position) -> None:
        """Store a draw before its sum is used, and wait until it is on the disk."""
        line = " ".join(map(str, position))
        self._drawn.append(line)
        if self._path is None:
            return
        with self._path.open("a", encoding="ascii") as file:
            file.write(f"\n{line}")  # begins a line even if a process died while it wrote one
            file.flush()
            os.fsync(file.fileno())

    @property
    def repeated(self) -> int:
        """The draws beyond one per round and exchange."""
        return len(self._drawn) - len(set(self._drawn))
