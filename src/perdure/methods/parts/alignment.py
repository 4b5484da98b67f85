"""Alignment of the clients' updates on the server (FedOMG, STAMP), and a record of conflicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from perdure.algebra.alignment import (
    Alignment,
    Doubles,
    Normalize,
    Scale,
    Scope,
    SearchSettings,
    Solver,
    align,
    align_models,
    cosines,
    gram_matrices,
    model_gram_matrices,
)
from perdure.config.section import Search
from perdure.contract.context import Context, Server
from perdure.contract.method import Diagnosis, Method
from perdure.contract.uploads import CollectedUploads, Sum
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


@dataclass(frozen=True)
class AligningMethod(Method):
    """Base class of methods whose server aligns the clients' updates."""

    kappa: Annotated[float, Field(ge=0), Search(0.1, 0.9)] = 0.5
    """Search radius (the paper's kappa)."""
    normalize: bool = True
    """Scale all updates to their mean norm first (F.4.1)."""
    scale: Scale = "published"
    """Length of an aligned update: eqs. 2 and 4 as printed (paper); divided by 1 + kappa^2 and, on
    stamp's clients, doubled, as in the authors' code (published); or divided by 1 + kappa, which
    leaves equal updates unchanged and is in neither (unit)."""
    solver: Solver = "exact"
    """exact, or the authors' search (published)."""
    scope: Scope = "model"
    """One alignment of the whole model, or one per tensor (not in the paper)."""
    diagnostics: bool = False
    """Record the cosines between updates and the fraction of pairs in conflict (FedOMG's Figures 6
    and 22; with stamp also between the tasks of each client)."""

    ServerState: ClassVar[type] = AlignmentRecord
    server_search: ClassVar[SearchSettings] = SearchSettings()
    """Settings of the published search for Gamma on the server."""

    @property
    def alignment(self) -> Alignment:
        """How the server aligns the clients' updates."""
        return self.alignment_by(self.kappa, "mean", self.server_search)

    def alignment_by(self, kappa: float, normalize: Normalize, search: SearchSettings) -> Alignment:
        """Return an alignment with the method's scale, solver and scope."""
        normalize = normalize if self.normalize else "none"
        return Alignment(kappa, normalize, self.scale, self.solver, self.scope, search)

    def align_clients(self, server: Server, uploads: CollectedUploads, context: Context) -> Tensors:
        """Return GA of the clients' updates (eq. 4)."""
        return align_updates(uploads, self.alignment)

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        """Return the conflicts of the last round; aligned updates grow with kappa and the scale."""
        record: AlignmentRecord = server.state
        hint = f"kappa {self.kappa:g} with scale: {self.scale} (try a smaller kappa)"
        return Diagnosis(record.tree(), divergence=hint)


def align_updates(uploads: CollectedUploads, alignment: Alignment) -> Tensors:
    """Return GA(theta_1 - theta, ..., theta_U - theta) of the clients' updates."""
    return align_models(list(uploads.per_client["update"].values()), alignment)


def client_conflicts(uploads: CollectedUploads) -> Conflicts:
    """Return the conflicts between the clients' updates."""
    gram = model_gram_matrices(list(uploads.per_client["update"].values())).sum(0)
    return pair_conflicts(cosines(gram))


def pair_conflicts(pair_cosines: Doubles) -> Conflicts:
    """Return the mean of the cosines of all pairs, and the fraction below zero."""
    if pair_cosines.size == 0:
        return Conflicts()
    return Conflicts(float(pair_cosines.mean()), float(np.mean(pair_cosines < 0)))


# ---- Alignment of the tasks of a client (STAMP), for many clients at once


def joined_directions(past: Tensors, current: Tensors) -> Tensors:
    """Return d^1 .. d^t by parameter name, float [clients, t, values].

    Args:
        past: d^1 .. d^{t-1} by parameter name, [clients, tasks, ...].
        current: d^t by parameter name, [clients, ...].

    """
    return {
        name: torch.cat([past[name].flatten(2), value.flatten(1).unsqueeze(1)], 1)
        for name, value in current.items()
    }


def align_tasks(
    directions: Tensors, current: Tensors, alignment: Alignment, step: float
) -> Tensors:
    """Return step * GA(d^1 .. d^t) of each client.

    A tensor d^t that is not finite is returned unchanged, so that the server rejects the client.
    """
    aligned = align(directions, alignment)
    return {
        name: torch.where(_is_finite(value), step * aligned[name].view_as(value), value)
        for name, value in current.items()
    }


def _is_finite(stack: Tensor) -> Tensor:
    """Return which rows of a stack are finite, in a shape that broadcasts against it."""
    return torch.isfinite(stack.flatten(1).sum(1)).view(-1, *[1] * (stack.dim() - 1))


def pair_statistics(directions: Tensors) -> Tensor:
    """Return the sum of cosines, the number of conflicts and of pairs of tasks, [clients, 3]."""
    pair_cosines = torch.from_numpy(cosines(gram_matrices(directions).sum(0)))
    pairs = torch.full((len(pair_cosines),), float(pair_cosines.shape[1]))
    return torch.stack([pair_cosines.sum(1), (pair_cosines < 0).sum(1), pairs], 1)


def task_conflicts(uploads: CollectedUploads) -> Conflicts:
    """Return the conflicts between tasks of the same client, over the pairs of all clients."""
    sums = {name: float(value) for name, value in uploads.total("conflicts").items()}
    pairs = sums["pairs"]  # 0 in the first task
    return Conflicts(sums["cosine"] / pairs, sums["conflicts"] / pairs) if pairs else Conflicts()


def conflicts_field(statistics: Tensor) -> dict[str, Sum]:
    """Return the field in which clients send their `pair_statistics`, [clients, 3]."""
    names = ("cosine", "conflicts", "pairs")
    return {"conflicts": Sum(dict(zip(names, statistics.unbind(1), strict=True)), weight=1.0)}
