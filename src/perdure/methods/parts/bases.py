"""A client's core bases: the principal directions of its layer inputs outside what is protected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.algebra.columns import Sample
from perdure.algebra.ranks import energy_rank, mass_rank
from perdure.algebra.subspaces import Space, principal
from perdure.federation.messages import Report
from perdure.methods.base import Client
from perdure.methods.parts.activations import observe, some_rows
from perdure.models.layers import Layer
from perdure.trees import Tensors

RankRule = Callable[[Tensor, float], int]
"""Singular values of the projected inputs and the inputs' squared norm -> number of directions."""


def gpm_rule(threshold: float) -> RankRule:
    """What is covered by old and new directions together is `threshold` of the squared norm."""
    return lambda singular, total: energy_rank(singular, threshold, total)


def mass_rule(threshold: float) -> RankRule:
    """FedProTIP's eq. 8: the new singular values are `threshold` of their sum."""
    return lambda singular, total: mass_rank(singular, threshold)


@dataclass(frozen=True)
class CoreBasis:
    """Directions U (d x r) with their singular values."""

    directions: Tensor
    singular: Tensor

    def first(self, rank: int) -> CoreBasis:
        """The leading directions."""
        return CoreBasis(self.directions[:, :rank], self.singular[:rank])


def core_basis(inputs: Tensor, space: Space, rule: RankRule) -> CoreBasis:
    """Eqs. 6 to 8: project the inputs away from the space, decompose, choose the rank."""
    directions, singular = principal(space.residual(inputs.double()))
    rank = rule(singular, float(inputs.double().square().sum()))
    basis = CoreBasis(directions.float().to(inputs), singular.float().to(inputs))
    return basis.first(rank)


def sampled_inputs(
    client: Client, layers: tuple[Layer, ...], images: int, columns: int, generator: torch.Generator
) -> Tensors:
    """At most `columns` random input columns of each layer, on at most `images` random examples."""
    rows = some_rows(client, images, generator)
    held = {layer.name: Sample(columns, generator) for layer in layers}
    observe(client, layers, held, rows)
    return {name: sample.columns() for name, sample in held.items()}


def sent_bytes(report: Report, name: str) -> float:
    """Bytes of a field's values that a client sent, on average."""
    if name in report.totals:
        return float(sum(value.nbytes for value in report.totals[name].values()))
    each = report.each.get(name, {})
    total = sum(value.nbytes for values in each.values() for value in values.values())
    return total / max(1, len(each))
