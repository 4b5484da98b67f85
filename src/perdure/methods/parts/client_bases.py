"""How the layer inputs of many clients become one basis per layer: united, pooled, in sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from perdure.algebra.sketches import gaussian_sketch, sketch_spectrum
from perdure.algebra.subspaces import (
    Subspace,
    covering_rank,
    energy_rank,
    mass_rank,
    principal_directions,
    project_out_columns,
)
from perdure.config.section import Fixed, Fraction, PositiveInt, Probability, Search
from perdure.contract.context import Client
from perdure.contract.uploads import CollectedUploads, Each, Field, Sum
from perdure.core.errors import refuse
from perdure.core.trees import Tensors
from perdure.methods.parts.protected_layers import ProtectsLayers, Subspaces, layer_subspace
from perdure.models.layers import Layer

# ---- One client: the principal directions of a layer's inputs outside the protected subspace

_CUT = 0.25
"""Fraction of the energy beyond the threshold that a client may leave out: so little is missing
from the joint decomposition, and an upload has few directions."""
_TINY = 1e-300
"""Lengths are taken for at least this, so that inputs that are all zero divide nothing by zero."""


@dataclass(frozen=True)
class PrincipalBasis:
    """Principal directions of a layer's inputs outside a subspace."""

    directions: Tensor
    """U: orthonormal columns, float [inputs, rank], in the order of their singular values."""
    singular: Tensor
    """Singular values, double [rank]."""
    energy: float
    """Squared norm of the inputs, within the subspace and outside."""

    @classmethod
    def of(cls, inputs: Tensor, space: Subspace) -> PrincipalBasis:
        """Return the basis of inputs, float [inputs, n], without their part in a subspace."""
        columns = inputs.double()
        directions, singular = principal_directions(space.project_out_columns(columns))
        return cls(directions.float().to(inputs), singular, float(columns.square().sum()))

    def first(self, rank: int) -> PrincipalBasis:
        """Return the first `rank` directions."""
        return PrincipalBasis(self.directions[:, :rank], self.singular[:rank], self.energy)

    def sketch(self, size: int, generator: Generator) -> Tensor:
        """Return the sketch B_k = U_k diag(s_k) G_k (eq. 40), float [inputs, size].

        Here G_k = U_k^T G, which has the same distribution and makes B_k independent of the signs
        of U_k, which rounding can flip.
        """
        scaled = self.directions * self.singular.to(self.directions)
        return gaussian_sketch(scaled @ self.directions.T, size, generator)


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

    def symmetric_root(self) -> Tensor:
        """Return R = U diag(s) U^T: R R^T is the second moment, and no sign of U is in it."""
        root: Tensor = self.scaled @ (self.scaled / self.scaled.norm(dim=0).clamp(min=_TINY)).T
        return root


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
    directions, singular = principal_directions(outside)
    total, rest = float(inputs.double().square().sum()), float(outside.square().sum())
    rank = covering_rank(singular, 1 - _CUT * (1 - threshold), total, rest)
    scaled = directions[:, :rank] * singular[:rank]
    return InputDirections(scaled * weight**0.5, total * weight, rest * weight)


def describe_inputs(
    client: Client, layers: tuple[Layer, ...], inputs: Tensors, threshold: float
) -> dict[str, InputDirections]:
    """Return by layer the directions of a client's inputs outside the broadcast `spaces`."""
    spaces: Subspaces = client.broadcast.get("spaces", {})
    described = {}
    for layer in layers:
        columns = inputs[layer.name]  # [d, n], drawn from all of the client's
        weight = len(client.data) / columns.shape[1]
        subspace = layer_subspace(spaces, layer)
        described[layer.name] = input_directions(columns, subspace, threshold, weight)
    return described


# ---- All clients: the ways in which their directions become one basis of a layer


class LayerBases(ABC):
    """A way in which the clients' layer inputs become one basis per layer."""

    field: ClassVar[str] = "directions"
    """The field that clients send."""

    @abstractmethod
    def send(
        self, client: Client, layers: tuple[Layer, ...], inputs: Tensors, threshold: float,
        generator: Generator,
    ) -> dict[str, Field]:  # fmt: skip
        """Return what a client sends of its inputs, [d, n] by layer."""

    @abstractmethod
    def directions(self, uploads: CollectedUploads, layer: Layer, threshold: float) -> Tensor:
        """Return the directions of a layer that the server adds, [d, r]; any columns span them."""


@dataclass(frozen=True)
class UnionBases(LayerBases):
    """The union of all directions that clients find: the letter of section 4.3."""

    by_mass: bool
    """Whether clients choose ranks by eq. 8 as printed, instead of GPM's rule."""
    field: ClassVar[str] = "bases"

    def send(
        self, client: Client, layers: tuple[Layer, ...], inputs: Tensors, threshold: float,
        generator: Generator,
    ) -> dict[str, Field]:  # fmt: skip
        """Return U_k by layer (eqs. 6 to 8), of which the server sees each client's."""
        spaces: Subspaces = client.broadcast.get("spaces", {})
        found: Tensors = {}
        for layer in layers:
            basis = PrincipalBasis.of(inputs[layer.name], layer_subspace(spaces, layer))
            if self.by_mass:
                rank = mass_rank(basis.singular, threshold)
            else:
                rank = energy_rank(basis.singular, threshold, basis.energy)
            found[layer.name] = basis.directions[:, :rank]
        return {self.field: Each(found)} if found else {}

    def directions(self, uploads: CollectedUploads, layer: Layer, threshold: float) -> Tensor:
        """Return U_1, ..., U_K side by side (eq. 9)."""
        return directions_of_all(uploads, layer)


@dataclass(frozen=True)
class PooledBases(LayerBases):
    """The directions that cover the threshold of all clients' inputs, as if in one place.

    A client describes a layer's inputs A (d x n) outside the protected subspace by its leading
    principal directions U and singular values s, with the energies |A|^2 and |A outside|^2. The
    server decomposes what all clients sent; the energies are those before the clients' cut.
    """

    def send(
        self, client: Client, layers: tuple[Layer, ...], inputs: Tensors, threshold: float,
        generator: Generator,
    ) -> dict[str, Field]:  # fmt: skip
        """Return U diag(s) and energies by layer, of which the server sees each client's."""
        described = describe_inputs(client, layers, inputs, threshold)
        trees = {name: found.tree() for name, found in described.items()}
        values = {f"{name}/{key}": v for name, tree in trees.items() for key, v in tree.items()}
        return {self.field: Each(values)}

    def directions(self, uploads: CollectedUploads, layer: Layer, threshold: float) -> Tensor:
        """Return the joint directions of a layer."""
        clients = []
        for client, value in uploads.per_client[self.field].items():
            scaled, energies = (value[f"{layer.name}/{key}"] for key in ("scaled", "energies"))
            check_columns(f"directions: {layer.name!r} of client {client}", scaled, layer.inputs)
            clients.append(InputDirections.read({"scaled": scaled, "energies": energies}))
        return self.join(clients, threshold)

    def join(self, clients: list[InputDirections], threshold: float) -> Tensor:
        """Return the directions that cover the threshold of all clients' energy, double [d, r]."""
        scaled = torch.cat([client.scaled for client in clients], dim=1)
        directions, singular = principal_directions(scaled)
        total, outside = sum(c.total for c in clients), sum(c.outside for c in clients)
        return directions[:, : covering_rank(singular, threshold, total, outside)]


@dataclass(frozen=True)
class SequentialBases(PooledBases):
    """The directions that clients add one after another, as in the authors' code."""

    def join(self, clients: list[InputDirections], threshold: float) -> Tensor:
        """Return the directions with which each client covers the threshold of its own energy.

        Those of the clients before it count; double [d, r].
        """
        basis = clients[0].scaled[:, :0]
        for client in clients:
            rest = project_out_columns(client.scaled, basis)
            covered = float(client.scaled.square().sum() - rest.square().sum())
            directions, singular = principal_directions(rest)
            rank = covering_rank(singular, threshold, client.total, client.outside - covered)
            basis = torch.cat([basis, directions[:, :rank]], dim=1)
        return basis


@dataclass(frozen=True)
class SummedBases(LayerBases):
    """The directions of sums over clients, to which the threshold is applied once.

    Sums are sketches (eq. 40) or, of small layers, second moments. Clients cut nothing.
    """

    sketch_size: int
    """Columns of a sketch."""
    largest_moment: int
    """Inputs of a layer up to which it travels as its second moment; beyond, as a sketch."""
    by_mass: bool = False
    """Whether the server chooses ranks by eq. 8 as printed, instead of GPM's rule."""

    def send(
        self, client: Client, layers: tuple[Layer, ...], inputs: Tensors, threshold: float,
        generator: Generator,
    ) -> dict[str, Field]:  # fmt: skip
        """Return second moments or sketches, and energies, of which sums are enough."""
        return {self.field: self.summand(describe_inputs(client, layers, inputs, 1.0), generator)}

    def summand(self, described: dict[str, InputDirections], generator: Generator) -> Sum:
        """Return one client's part of the sums."""
        values: Tensors = {}
        for name, found in described.items():
            if len(found.scaled) > self.largest_moment:
                sketch = gaussian_sketch(found.symmetric_root(), self.sketch_size, generator)
                values[f"{name}/sketch"] = sketch.float()
            else:
                values[f"{name}/moment"] = (found.scaled @ found.scaled.T).float()
            values[f"{name}/energies"] = found.tree()["energies"]
        return Sum(values, 1.0)

    def directions(self, uploads: CollectedUploads, layer: Layer, threshold: float) -> Tensor:
        """Return the directions of the sums that cover the threshold and are not noise."""
        sums, noise = uploads.total(self.field), uploads.noise.get(self.field, 0.0)
        total, outside = sums[f"{layer.name}/energies"].tolist()
        if noise:
            outside = min(max(outside, 0.0), total)
        moment = sums.get(f"{layer.name}/moment")
        matrix = sums[f"{layer.name}/sketch"] if moment is None else moment
        spectrum = sketch_spectrum(matrix.double(), noise)
        energies = spectrum.singular.square() if moment is None else spectrum.singular
        with_rest = moment is None and noise  # what lies below the noise's edge counts as well
        whole = energies.new_tensor(spectrum.energy) if with_rest else energies.sum()
        singular = (energies * (outside / whole.clamp(min=_TINY))).sqrt()
        singular = singular[: spectrum.rank] if noise else singular
        if self.by_mass:
            rank = mass_rank(singular, threshold)
        else:
            rank = covering_rank(singular, threshold, total, outside)
        return spectrum.directions[:, :rank]


def directions_of_all(uploads: CollectedUploads, layer: Layer) -> Tensor:
    """Return the directions of one layer that all clients sent, side by side: [inputs, n]."""
    found = {client: value[layer.name] for client, value in uploads.per_client["bases"].items()}
    for client, directions in found.items():
        check_columns(f"bases: {layer.name!r} of client {client}", directions, layer.inputs)
    return torch.cat(list(found.values()), dim=1)


def check_columns(where: str, columns: Tensor, inputs: int) -> None:
    """Refuse columns that are not vectors of a layer's input space."""
    if columns.dim() != 2 or len(columns) != inputs:
        refuse(where, f"shape {list(columns.shape)}", f"columns of {inputs} values")


def mean_basis_bytes(uploads: CollectedUploads) -> float:
    """Return the mean number of bytes of the bases per client."""
    sums = [uploads.sums.get(name, {}) for name in ("bases", "directions")]
    by_client = [uploads.per_client.get(name, {}) for name in ("bases", "directions")]
    summed = sum(value.nbytes for values in sums for value in values.values())
    shown = [
        v.nbytes for clients in by_client for values in clients.values() for v in values.values()
    ]
    return float(summed) + sum(shown) / max(1, *(len(clients) for clients in by_client))


# ---- The keys that choose a way

LARGEST_MOMENT = 1024
"""Inputs up to which a pooled layer travels as its second moment: 4 MB, the size of many models."""


@dataclass(frozen=True)
class ExtractsBases(ProtectsLayers):
    """A method whose clients send bases of their layer inputs."""

    threshold: Annotated[Fraction, Search(0.5, 0.97)] = 0.9
    """Fraction of a layer's input energy that the protected subspace must cover (the paper's
    epsilon_l), in (0, 1]."""
    threshold_increment: Annotated[Probability, Fixed()] = 0.001
    """Added to `threshold` with each task."""
    bases: Literal["union", "pooled", "sequential"] = "pooled"
    """How the clients' directions become one basis. union: all of them (the letter of section 4.3;
    the rank grows with the number of clients). pooled: those that cover `threshold` of all clients'
    inputs together. sequential: each client adds what its inputs need beyond the clients before it
    (the authors' code)."""
    rank_rule: Literal["gpm", "mass"] = "gpm"
    """gpm: squared norms, old and new directions together (the published behavior). mass: eq. 8 as
    printed."""
    max_columns: Annotated[PositiveInt, Fixed()] = 512
    """Maximum number of input columns per layer that a client decomposes (m_s)."""
    max_examples: Annotated[PositiveInt, Fixed()] = 1280
    """Maximum number of a client's examples from which the columns are drawn."""
    transport: Literal["bases", "sketch"] = "bases"
    """bases: the server sees each client's bases. sketch: only sums leave a client, and the
    threshold is applied to the sum: sketches with `bases: union` (eq. 40), and with pooled second
    moments of layers of up to 1024 inputs."""
    sketch_size: Annotated[PositiveInt, Fixed()] = 128
    """Columns of a layer's sketch (s_l)."""

    @property
    def layer_bases(self) -> LayerBases:
        """The way in which clients' directions become one basis."""
        by_mass = self.rank_rule == "mass"
        if self.transport == "sketch":
            largest_moment = 0 if self.bases == "union" else LARGEST_MOMENT
            return SummedBases(self.sketch_size, largest_moment, by_mass)
        if self.bases == "union":
            return UnionBases(by_mass)
        return PooledBases() if self.bases == "pooled" else SequentialBases()

    def check_config(self, config: Any) -> str | None:
        """Refuse pairs of options that do not exist."""
        if self.bases != "union" and self.rank_rule == "mass":
            return f"method.bases: must be union with method.rank_rule mass, got {self.bases!r}"
        if self.bases == "sequential" and self.transport == "sketch":
            return "method.bases: must be union or pooled with transport sketch, got 'sequential'"
        return None
