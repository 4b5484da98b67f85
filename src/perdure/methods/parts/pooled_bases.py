"""Core bases of all clients' inputs together: as if their data lay in one place.

A client describes a layer's inputs A (d x n) outside the protected subspace by its leading
principal directions U and singular values s, with the energies |A|^2 and |A outside|^2. The server
finds the principal directions of what all clients sent and takes as many as cover the threshold of
the energy of all clients' inputs. Clients cut at 1 - (1 - threshold) / 4, so that little is missing
from the joint decomposition; the energies are those before the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.algebra.rank_rules import covering_rank
from perdure.algebra.subspaces import Subspace, principal, project_out_columns
from perdure.core.trees import Tensors

_CUT = 0.25
"""Fraction of the energy beyond the threshold that a client may leave out."""


@dataclass(frozen=True)
class InputDirections:
    """Principal directions of one client's layer inputs outside the protected subspace."""

    scaled: Tensor
    """double [d, r]: U diag(s)."""
    total: float
    """Energy |A|^2 of all inputs, protected or not."""
    outside: float
    """Energy of the inputs outside the protected subspace, before the cut."""

    def tree(self) -> Tensors:
        """Return it as tensors, which travel."""
        energies = torch.tensor([self.total, self.outside], dtype=torch.float64)
        return {"scaled": self.scaled.float(), "energies": energies}

    @classmethod
    def read(cls, tree: Tensors) -> InputDirections:
        """Return the inverse of `tree`."""
        total, outside = tree["energies"].tolist()
        return cls(tree["scaled"].double(), total, outside)


def input_directions(
    inputs: Tensor, subspace: Subspace, threshold: float, weight: float = 1.0
) -> InputDirections:
    """Return a client's leading input directions, cut where little is missing.

    Args:
        inputs: Float [d, n]: columns of layer inputs.
        subspace: The protected subspace.
        threshold: Fraction of the energy that the joint basis will cover.
        weight: Factor on the energies: columns that each of the n stands for.
    """
    outside = subspace.project_out_columns(inputs.double())
    directions, singular = principal(outside)
    total, rest = float(inputs.double().square().sum()), float(outside.square().sum())
    rank = covering_rank(singular, 1 - _CUT * (1 - threshold), total, rest)
    scaled = directions[:, :rank] * singular[:rank]
    return InputDirections(scaled * weight**0.5, total * weight, rest * weight)


def pooled_directions(clients: list[InputDirections], threshold: float) -> Tensor:
    """Return the directions that cover the threshold of all clients' energy, double [d, r]."""
    directions, singular = principal(torch.cat([client.scaled for client in clients], dim=1))
    total, outside = sum(c.total for c in clients), sum(c.outside for c in clients)
    return directions[:, : covering_rank(singular, threshold, total, outside)]


def sequential_directions(clients: list[InputDirections], threshold: float) -> Tensor:
    """Return the directions that clients add one after another, double [d, r].

    Each covers the threshold of its own energy with the directions of the clients before it.
    """
    basis = clients[0].scaled[:, :0]
    for client in clients:
        rest = project_out_columns(client.scaled, basis)
        covered = float(client.scaled.square().sum() - rest.square().sum())
        directions, singular = principal(rest)
        rank = covering_rank(singular, threshold, client.total, client.outside - covered)
        basis = torch.cat([basis, directions[:, :rank]], dim=1)
    return basis


def united_directions(clients: list[InputDirections]) -> Tensor:
    """Return the directions of all clients side by side: the union of their subspaces."""
    return torch.cat([principal(client.scaled)[0] for client in clients], dim=1)
