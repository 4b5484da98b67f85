"""Alignment of the clients' updates on the server (FedOMG, STAMP), and a record of conflicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from perdure.algebra.alignment import Alignment, Array, align_models, cosines, model_gram_matrices
from perdure.contract import CollectedUploads
from perdure.core.trees import Tensors, Tree


@dataclass(frozen=True)
class Conflicts:
    """Agreement of the directions of an alignment, over all pairs of them."""

    cosine: float | None = None
    """Mean cosine. None if there are no pairs."""
    conflicts: float | None = None
    """Fraction of pairs with a negative cosine. None if there are no pairs."""


@dataclass(frozen=True)
class AlignmentRecord:
    """Server state: the conflicts of the last round, if `diagnostics` is on."""

    clients: Conflicts | None = None
    """Conflicts between the clients' updates."""
    tasks: Conflicts | None = None
    """Conflicts between the tasks of a client, over the pairs of all clients."""

    def tree(self) -> Tree:
        """Return the recorded conflicts as plain numbers, for `diagnostics`."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def align_updates(uploads: CollectedUploads, alignment: Alignment) -> Tensors:
    """Return GA(theta_1 - theta, ..., theta_U - theta) of the clients' updates."""
    return align_models(list(uploads.per_client["update"].values()), alignment)


def client_conflicts(uploads: CollectedUploads) -> Conflicts:
    """Return the conflicts between the clients' updates."""
    gram = model_gram_matrices(list(uploads.per_client["update"].values())).sum(0)
    return pair_conflicts(cosines(gram))


def pair_conflicts(pair_cosines: Array) -> Conflicts:
    """Return the mean of the cosines of all pairs, and the fraction below zero."""
    if pair_cosines.size == 0:
        return Conflicts()
    return Conflicts(float(pair_cosines.mean()), float(np.mean(pair_cosines < 0)))
