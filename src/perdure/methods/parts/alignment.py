"""The server's half of FedOMG, which STAMP has too: aligned updates, and a record of conflicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from perdure.algebra.alignment import Alignment, Array, align_models, cosines, model_gram_matrices
from perdure.contract import CollectedUploads
from perdure.core.trees import Tensors, Tree


@dataclass(frozen=True)
class Conflicts:
    """How the directions of an alignment agree, over all pairs of them."""

    cosine: float | None = None
    """Mean cosine; None if there is no pair."""
    conflicts: float | None = None
    """Fraction of pairs with a negative cosine; None if there is no pair."""


@dataclass(frozen=True)
class AlignmentRecord:
    """Server state: what the last round recorded, if `diagnostics` is on."""

    clients: Conflicts | None = None
    """Between the updates that the server aligned."""
    tasks: Conflicts | None = None
    """Between the tasks that clients aligned; the mean over all pairs of all clients."""

    def tree(self) -> Tree:
        """Return the parts that were recorded, as plain numbers."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def align_updates(uploads: CollectedUploads, alignment: Alignment) -> Tensors:
    """Return GA(theta_1 - theta, ..., theta_U - theta) of the clients' updates."""
    return align_models(list(uploads.per_client["update"].values()), alignment)


def client_conflicts(uploads: CollectedUploads) -> Conflicts:
    """Return how the clients' updates agree."""
    gram = model_gram_matrices(list(uploads.per_client["update"].values())).sum(0)
    return pair_conflicts(cosines(gram))


def pair_conflicts(found: Array) -> Conflicts:
    """Return the mean of the cosines of all pairs and the fraction below zero."""
    if found.size == 0:
        return Conflicts()
    return Conflicts(float(found.mean()), float(np.mean(found < 0)))
