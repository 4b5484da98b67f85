"""FedProTIP: projection in every local step, and task identity from subspaces of the features.

FedProTIP: Task-Agnostic Federated Continual Learning via Replay-Free Gradient Projection
(anonymous authors, under double-blind review).

Training (section 4.1): clients project each gradient away from the core bases Phi^(1:t-1) of old
tasks. Bases (4.2, 4.3), an exchange at a task's end: each client sends the principal directions of
its layer inputs outside Phi; the server adds their union. Task identity (4.4), a second exchange:
clients send how strongly the features of each of their tasks lie in each task's block of feature
directions; a test example goes to the task whose pattern is nearest.

Ours: clients extract in parallel against Phi^(1:t-1) and the union does not depend on their order;
weight decay is projected with the gradient; biases and norms are frozen after the first task, and
a shared head is protected like any layer; references come from second moments of features, which
clients keep instead of activations and never send; all blocks together take at most half of the
feature space, however many tasks come.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perdure.config.types import UNQUOTED_OFF, Fraction, PositiveInt, Probability
from perdure.contract import (
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    Each,
    Exchange,
    Method,
    Needs,
    Prepared,
    ProjectOut,
    Server,
    Sum,
    Train,
)
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts import bases, blocks, pooled_bases, routing
from perdure.methods.parts.gaussian_router import (
    gaussians_exchange,
    nearest_task,
    task_densities,
)
from perdure.methods.parts.layer_inputs import sample_layer_inputs
from perdure.methods.parts.projection_diagnostics import ProjectionRecord, local_gradient
from perdure.methods.parts.protected_layers import (
    FEATURES,
    Subspaces,
    feature_layer,
    project_out_change,
    protectable_layers,
    send_subspaces,
    trainable_names,
    used_fraction,
)
from perdure.methods.parts.routing import SecondMoments, references_exchange
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import Layer
from perdure.models.network import Network


@dataclass(frozen=True)
class FedProTIPState:
    """What the server keeps of the tasks so far."""

    spaces: Subspaces = field(default_factory=dict)
    """Phi^(1:t): by weight name the protected subspace of the layer's inputs."""
    blocks: Tensors = field(default_factory=dict)
    """By task the feature directions that it added, orthonormal [feature size, rank]."""
    references: Tensors = field(default_factory=dict)
    """By client omega^(tau) as rows [tasks, tasks]; under `all` those of the summed form."""
    gaussians: Tensors = field(default_factory=dict)
    """Of the classes so far with `router: gaussian`: count, mean and covariance."""
    basis_bytes: float = 0.0
    """Bytes of the bases that a client sent last, on average."""
    geometry: ProjectionRecord = field(default_factory=ProjectionRecord)
    """Empty without `diagnostics`."""


@dataclass(frozen=True)
class FedProTIP(Method):
    """Local projection, core bases and routing.

    The paper has a threshold of 0.7 (pretrained networks) and 0.95 (from scratch) with 5 clients;
    the subspace grows with the union over clients, so many clients with little data need less.
    """

    threshold: Fraction = 0.6
    """Fraction of a layer's input energy that the protected subspace must cover (the paper's
    epsilon_l), in (0, 1]."""
    threshold_increment: Probability = 0.001
    """Added to `threshold` with each task."""
    bases: Literal["union", "pooled", "sequential"] = "union"
    """How the clients' directions become one basis. union: all of them (the letter of section 4.3;
    the rank grows with the number of clients). pooled: those that cover `threshold` of all clients'
    inputs together. sequential: each client adds what its inputs need beyond the clients before it
    (the authors' code)."""
    rank_rule: Literal["gpm", "mass"] = "gpm"
    """gpm: squared norms, old and new directions together (the published behavior). mass: eq. 8 as
    printed."""
    max_columns: PositiveInt = 512
    """Maximum number of input columns per layer that a client decomposes (m_s)."""
    max_examples: PositiveInt = 1280
    """Maximum number of a client's examples from which the columns are drawn."""
    projection: Literal["local", "server"] = "local"
    """Where updates are projected: in every local step (local), or once on the aggregated update
    (server, the comparison of section 6.3)."""
    routing: Annotated[Literal["sample", "batch", "off"], UNQUOTED_OFF] = "sample"
    """How the task of a test example is predicted: from the example alone (sample), from its batch,
    which must be of one task (batch), or not at all (off, the paper's -t)."""
    router: Literal["references", "gaussian"] = "references"
    """references: the nearest pattern of relevances (the paper). gaussian: the largest density of
    Gaussian classes, from sums over features (not in the paper)."""
    routing_batch: PositiveInt = 64
    """Examples per batch with `routing: batch`."""
    space_rank: PositiveInt = 20
    """Maximum number of feature directions that a task adds, unless there are more clients; at most
    half of those that are left."""
    drop_first: bool = False
    """Leave the first block out of the relevance vectors, as the authors' code does."""
    references: Literal["moments", "strict"] = "moments"
    """moments: exact for later blocks. strict: nothing is kept of old tasks, and their relevance to
    later blocks counts as zero."""
    transport: Literal["bases", "sketch"] = "bases"
    """bases: the server sees each client's bases. sketch: only sums leave a client (eq. 40)."""
    sketch_size: PositiveInt = 128
    """Columns of a layer's sketch (s_l)."""
    frozen: tuple[str, ...] = ()
    """Prefixes of parameters that are frozen after the first task (pretrained networks: conv1, bn1,
    layer1, layer2)."""
    diagnostics_: Annotated[bool, Field(alias="diagnostics")] = False
    """Estimate rho and beta of section 5 at each task's end."""

    paper: ClassVar[str] = "FedProTIP: Replay-Free Gradient Projection (under review)"
    ServerState: ClassVar[type] = FedProTIPState
    ClientState: ClassVar[type] = SecondMoments

    @property
    def needs(self) -> Needs:
        """Return its needs: one head per task on split streams; fields per client unless summed."""
        bases_fields = ("bases",) if self.bases == "union" else ("bases", "inputs")
        shown = (*bases_fields, "references") if self.uses_blocks else bases_fields
        return Needs(
            head={"split": "growing"},
            stable_features=True,
            per_client_fields=shown if self.transport == "bases" else (),
            prediction_state=("blocks", "references") if self.uses_blocks else ("gaussians",),
            trained_layers=True,
        )

    def check_config(self, config: Any) -> str | None:
        """Refuse routing on a pool stream, where a task is not one distribution."""
        if config.stream.resembles == "pool" and self.routing != "off":
            return f"method.routing: must be off on a pool stream, got {self.routing!r}"
        if self.bases != "union" and self.rank_rule == "mass":
            return f"method.bases: must be union with method.rank_rule mass, got {self.bases!r}"
        if self.bases == "sequential" and self.transport == "sketch":
            return "method.bases: must be union or pooled with transport sketch, got 'sequential'"
        return None

    @property
    def uses_blocks(self) -> bool:
        """Return whether blocks of feature directions distinguish tasks, as in the paper."""
        return self.routing != "off" and self.router == "references"

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Project local steps; at the task's end collect its bases, then its references."""
        train = Train(
            broadcast=send_subspaces,
            prepare=self.project_steps if self.projection == "local" and context.task else None,
            adjust=project_out_change,  # removes rounding if clients have projected
            trainable=trainable_names(context, self.protected(context.network)),
            batch_statistics=context.task == 0,
        )
        collect = Exchange("bases", "all", self.send_taken, self.extract, self.unite)
        if self.routing == "off":
            return [train, collect]
        if self.router == "gaussian":
            return [train, collect, gaussians_exchange()]
        return [train, collect, references_exchange(summed=self.transport == "sketch")]

    def project_steps(self, client: Client) -> Prepared:
        """Eq. 4: g <- g - g Phi Phi^T, weight decay included."""
        return Prepared(transforms=(ProjectOut(client.broadcast.get("spaces", {})),))

    def send_taken(self, server: Server, context: Context) -> Tree:
        """Send Phi^(1:t-1), and the feature directions of earlier blocks."""
        return send_subspaces(server, context) | blocks.feature_space_field(server.state.blocks)

    def extract(self, client: Client) -> ClientResult:
        """Eqs. 6 to 8: send the principal directions of each layer's inputs outside Phi."""
        generator, context = client.secret("bases"), client.context
        layers, state = self.protected(context.network), None
        seen = (*layers, feature_layer(context.network)) if self.uses_blocks else layers
        inputs = sample_layer_inputs(client, seen, self.max_examples, self.max_columns, generator)
        found: dict[str, bases.CoreBasis] = {}
        if self.bases == "union":
            rule = bases.RANK_RULES[self.rank_rule](self.threshold_at(context.task))
            found = bases.core_bases(client, layers, inputs, rule)
        if self.uses_blocks:
            found[FEATURES] = blocks.feature_basis(client, inputs[FEATURES], self.space_rank)
            state = client.state.with_task(client, inputs[FEATURES], self.references == "strict")
        size = self.sketch_size if self.transport == "sketch" else None
        fields: Tree = {"bases": bases.bases_field(found, size, generator)} if found else {}
        if self.bases != "union":
            fields["inputs"] = self._inputs_field(client, layers, inputs, generator)
        if self.diagnostics_:
            fields["gradient"] = Sum(local_gradient(client, layers))
        return ClientResult(fields, state)

    def _inputs_field(
        self,
        client: Client,
        layers: tuple[Layer, ...],
        inputs: Tensors,
        generator: torch.Generator,
    ) -> Each | Sum:
        if self.transport == "sketch":  # nothing is cut from what is summed
            described = pooled_bases.describe_inputs(client, layers, inputs, 1.0)
            return pooled_bases.summed_field(described, self.sketch_size, generator)
        threshold = self.threshold_at(client.context.task)
        described = pooled_bases.describe_inputs(client, layers, inputs, threshold)
        return pooled_bases.each_field(described)

    def unite(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        """Eq. 9: add the union of the clients' directions to Phi, and a block to the features."""
        old, threshold = server.state, self.threshold_at(context.task)
        layers, spaces = self.protected(context.network), server.state.spaces
        if self.bases == "union":
            rule = bases.gpm_rule(threshold)
            spaces = bases.add_client_directions(spaces, layers, uploads, rule)
        else:
            spaces = pooled_bases.add_joined_directions(
                spaces, layers, uploads, threshold, self.bases
            )
        new: Tree = {"spaces": spaces, "basis_bytes": bases.mean_basis_bytes(uploads)}
        if self.uses_blocks:
            new["blocks"] = blocks.add_block(old.blocks, uploads, context, self.space_rank)
        if self.diagnostics_:
            gradient = uploads.mean("gradient")
            new["geometry"] = old.geometry.with_task(context.task, gradient, old.spaces, spaces)
        return replace(server, state=replace(old, **new))

    def route(
        self, server: Server, x: Tensor, network: Network, client_state: Any = None
    ) -> Tensor | None:
        """Eqs. 10 and 11: the task of each row by majority vote of the clients' references."""
        state = server.state
        if self.routing == "off" or not (state.references or state.gaussians):
            return None
        features = network.features(server.params, x, ForwardPass(buffers=server.buffers))
        if self.router == "gaussian":
            densities = task_densities(features, state.gaussians, network.outputs)
            return nearest_task(densities, self.routing_batch if self.routing == "batch" else None)
        relevances = routing.relevance(features, routing.block_list(state.blocks))
        if self.routing == "batch":
            relevances = routing.pool_by_batch(relevances, self.routing_batch)
        references = routing.stack_references(state.references, len(state.blocks))
        return routing.predict_tasks(relevances, references, self.drop_first)

    def protected(self, network: Network) -> tuple[Layer, ...]:
        """Return the layers that are projected."""
        return tuple(x for x in protectable_layers(network) if not x.name.startswith(self.frozen))

    def threshold_at(self, task: int) -> float:
        """Return epsilon_l of a task."""
        return bases.threshold_at(task, self.threshold, self.threshold_increment)

    def diagnostics(self, server: Server, context: Context) -> Tree:
        """Return at a task's end each layer's used share, bytes, and rho and beta if recorded."""
        if context.round < context.rounds:
            return {}
        state = server.state
        found: Tree = {
            "used": used_fraction(state.spaces, self.protected(context.network)),
            "basis_bytes": state.basis_bytes,
            "routing": self.routing if self.routing == "off" else f"per {self.routing}",
        }
        if self.diagnostics_:
            found["geometry"] = {"rho": state.geometry.rho, "beta": state.geometry.beta}
        return found
