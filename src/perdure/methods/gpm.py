"""GPM on FedAvg: each client keeps its own bases and projects its own steps.

Saha, Garg, Roy: Gradient Projection Memory for Continual Learning, ICLR 2021; on FedAvg as in FOT
(Bakman et al., ICLR 2024, appendix F.2): clients compute the orthogonal set locally at each task's
end and project their local updates; the server averages. Nothing of the bases leaves a client.

Ours: a client works with the global model of the task's end; biases and norms are frozen after the
first task.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from perdure.algebra.subspaces import Subspace, extend_basis
from perdure.config.types import Fraction, PositiveInt, Probability
from perdure.contract import (
    Client,
    ClientResult,
    Context,
    Exchange,
    Method,
    Needs,
    Prepared,
    ProjectOut,
    Train,
)
from perdure.core.trees import Tensors
from perdure.methods.parts.bases import core_basis, gpm_rule, threshold_at
from perdure.methods.parts.layer_inputs import sample_layer_inputs
from perdure.methods.parts.protected_layers import protectable_layers, trainable_names


@dataclass(frozen=True)
class LocalBases:
    """What a client keeps."""

    bases: Tensors = field(default_factory=dict)
    """M: by weight name an orthonormal basis [inputs, rank] of the protected inputs."""


@dataclass(frozen=True)
class GPM(Method):
    """Local bases, local projection."""

    threshold: Fraction = 0.95
    """Fraction of a layer's input energy that the bases must cover (GPM's epsilon_th), in (0,
    1]."""
    threshold_increment: Probability = 0.0
    """Added to `threshold` with each task."""
    max_columns: PositiveInt = 512
    """Maximum number of input columns per layer that a client decomposes."""
    max_examples: PositiveInt = 1280
    """Maximum number of a client's examples from which the columns are drawn."""

    paper: ClassVar[str] = "Saha et al., ICLR 2021; on FedAvg as in Bakman et al., ICLR 2024"
    ClientState: ClassVar[type] = LocalBases

    @property
    def needs(self) -> Needs:
        """Return the paper's setting: one head per task on split streams."""
        return Needs(head={"split": "growing"}, trained_layers=True, stable_features=True)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Project local steps; extend the bases at the task's end, on each client alone."""
        train = Train(
            prepare=self.project_steps if context.task > 0 else None,
            trainable=trainable_names(context, protectable_layers(context.network)),
            batch_statistics=context.task == 0,
        )
        return [train, Exchange("bases", client_work=self.extend_bases)]

    def project_steps(self, client: Client) -> Prepared:
        """With the client's own M: g <- g - g M M^T."""
        spaces = {name: {"basis": basis} for name, basis in client.state.bases.items()}
        return Prepared(transforms=(ProjectOut(spaces),))

    def extend_bases(self, client: Client) -> ClientResult:
        """GPM's update of the memory: directions that old ones do not cover, by squared norms."""
        context = client.context
        layers, rule = (
            protectable_layers(context.network),
            gpm_rule(self.threshold_at(context.task)),
        )
        inputs = sample_layer_inputs(
            client, layers, self.max_examples, self.max_columns, client.draw("gpm")
        )
        bases: Tensors = {}
        for name, columns in inputs.items():
            old: Tensor = client.state.bases.get(name, columns[:, :0])
            new = core_basis(columns, Subspace.of(old), rule)
            bases[name] = extend_basis(old, new.directions)
        return ClientResult(state=LocalBases(bases))

    def threshold_at(self, task: int) -> float:
        """Return epsilon_th of a task."""
        return threshold_at(task, self.threshold, self.threshold_increment)
