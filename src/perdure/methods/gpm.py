"""GPM: gradient projection memory on every client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from perdure.algebra.subspaces import Subspace, energy_rank, extend_basis, principal_directions
from perdure.config.section import Fixed, Fraction, PositiveInt, Search
from perdure.contract.context import Client, Context
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.needs import Needs, Preferences
from perdure.contract.transforms import ProjectOut
from perdure.contract.uploads import ClientResult
from perdure.core.trees import Tensors
from perdure.methods.parts.protected_layers import (
    ProtectsLayers,
    layers_shared_by_tasks,
    sample_layer_inputs,
    trainable_names,
)


@dataclass(frozen=True)
class LocalBases:
    """Client state: the client's protected subspaces."""

    bases: Tensors = field(default_factory=dict)
    """M: by weight name an orthonormal basis of protected layer inputs, float [inputs, rank]."""


@dataclass(frozen=True)
class GPM(ProtectsLayers):
    """Gradient projection memory on every client: each client projects its own local steps.

    At a task's end every client extends, per layer, an orthonormal basis M of its inputs until it
    covers `threshold` of their squared norm. From the second task on, gradients are projected:
    g <- g - g M M^T, so that old inputs give the same outputs. The server averages. Uploads are
    those of FedAvg; the bases never leave a client.

    Client state:
        bases: by weight name, float [inputs, rank]. M: orthonormal columns.

    Differs from the papers: a client computes its basis with the global model of the task's end;
    biases and norms are frozen after the first task.

    Reference: Saha, Garg, Roy: Gradient Projection Memory for Continual Learning, ICLR 2021; on
    FedAvg as in Bakman et al.: Federated Orthogonal Training, ICLR 2024, appendix F.2.
    """

    threshold: Annotated[Fraction, Search(0.6, 0.99)] = 0.95
    """Fraction of a layer's input energy that the bases must cover (GPM's epsilon_th), in (0,
    1]."""
    max_columns: Annotated[PositiveInt, Fixed()] = 512
    """Maximum number of input columns per layer that a client decomposes."""
    max_examples: Annotated[PositiveInt, Fixed()] = 1280
    """Maximum number of a client's examples from which the columns are drawn."""

    title: ClassVar[str] = "GPM"
    family: ClassVar[str] = "Projection"
    idea: ClassVar[str] = "Each client projects its own steps out of its own subspaces."
    paper: ClassVar[str] = "Saha et al., ICLR 2021; on FedAvg as in Bakman et al., ICLR 2024"
    ClientState: ClassVar[type] = LocalBases
    needs: ClassVar[Needs] = Needs(
        prefers=Preferences(head={"split": "shared"}), layers="protected", stable_features=True
    )

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Project local steps; extend the bases at the task's end, on each client alone."""
        train = Train(
            prepare=self.project_steps if context.task > 0 else None,
            trainable=trainable_names(context, layers_shared_by_tasks(context.network)),
            batch_statistics=context.task == 0,
        )
        return [train, Exchange("bases", client_work=self.extend_bases)]

    def project_steps(self, client: Client) -> Prepared:
        """Return the projection of gradients with the client's M: g <- g - g M M^T."""
        spaces = {name: {"basis": basis} for name, basis in client.state.bases.items()}
        return Prepared(transforms=(ProjectOut(spaces),))

    def extend_bases(self, client: Client) -> ClientResult:
        """Return the bases, with the principal directions of this task's layer inputs added."""
        layers = layers_shared_by_tasks(client.context.network)
        threshold, generator = self.threshold_at(client.context.task), client.draw("gpm")
        inputs = sample_layer_inputs(client, layers, self.max_examples, self.max_columns, generator)
        bases: Tensors = {}
        for name, columns in inputs.items():
            basis = client.state.bases.get(name, columns[:, :0])
            outside = Subspace.of(basis).project_out_columns(columns.double())
            directions, singular = principal_directions(outside)
            rank = energy_rank(singular, threshold, float(columns.double().square().sum()))
            bases[name] = extend_basis(basis, directions.float().to(columns)[:, :rank])
        return ClientResult(state=LocalBases(bases))
