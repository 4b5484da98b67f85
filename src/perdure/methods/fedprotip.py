"""FedProTIP: gradient projection and task prediction from feature subspaces."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from perdure.config.section import UNQUOTED_OFF, Fixed, Fraction, PositiveInt, Probability, Search
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.method import Diagnosis, Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.transforms import ProjectOut
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts import bases, gaussian_router, routing
from perdure.methods.parts import routing as blocks
from perdure.methods.parts.bases import sample_layer_inputs
from perdure.methods.parts.pooled_bases import LayerBases
from perdure.methods.parts.protected_layers import (
    FEATURES,
    ProjectionRecord,
    Subspaces,
    feature_layer,
    layers_shared_by_tasks,
    local_gradient,
    project_out_change,
    send_subspaces,
    trainable_names,
    used_fraction,
)
from perdure.methods.parts.routing import SecondMoments, alike_warnings, references_exchange
from perdure.models.layers import Layer
from perdure.models.network import Network
from perdure.models.ops import ForwardPass

_HEAD_REASON = "a predicted task chooses one of the tasks' heads"


@dataclass(frozen=True)
class FedProTIPState:
    """Server state: subspaces, blocks and references of the tasks so far."""

    spaces: Subspaces = field(default_factory=dict)
    """Phi^(1:t): by weight name the protected subspace of the layer's inputs."""
    blocks: Tensors = field(default_factory=dict)
    """By task (its index as a string) its feature directions, orthonormal [feature size, rank]."""
    references: Tensors = field(default_factory=dict)
    """By client (its index as a string) omega^(tau) as rows [tasks, tasks]; or under `all`, of the
    sums over clients."""
    gaussians: Tensors = field(default_factory=dict)
    """Count, mean and covariance of the classes so far, with `router: gaussian`."""
    basis_bytes: float = 0.0
    """Mean bytes of the bases per client in the last exchange."""
    geometry: ProjectionRecord = field(default_factory=ProjectionRecord)
    """rho and beta of section 5, if `diagnostics` is on."""


@dataclass(frozen=True)
class FedProTIP(Method):
    """Projection of every local step, and task prediction from subspaces of the features.

    Training (section 4.1): clients project each gradient out of the protected subspaces
    Phi^(1:t-1) of old tasks. Bases (4.2, 4.3), an exchange at a task's end: each client sends the
    principal directions of its layer inputs outside Phi; the server adds those that cover the
    inputs of all clients to Phi. Task prediction (4.4), a second exchange: clients send how
    strongly the features of each of their tasks lie in each task's block of feature directions
    (references); a test example is assigned to the task whose reference is nearest.

    Server state: `FedProTIPState`.
    Client state: `SecondMoments`.

    Differs from the paper: clients extract bases in parallel against Phi^(1:t-1), and the union
    does not depend on their order; weight decay is projected with the gradient; biases and norms
    are frozen after the first task, and a shared head is protected like any layer; references come
    from second moments of features, which clients store instead of activations and never send; all
    blocks together take at most half of the feature space, for any number of tasks. `bases` other
    than `union`, `pool_references` and `router: gaussian` are not in the paper. No router can tell
    tasks apart whose inputs are the same and whose labels alone differ.

    The paper has a threshold of 0.7 (pretrained networks) and 0.95 (from scratch) with a union over
    5 clients, which grows with their number. The defaults were chosen on validation rows.

    Reference: FedProTIP: Task-Agnostic Federated Continual Learning via Replay-Free Gradient
    Projection (anonymous authors, under double-blind review).
    """

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
    projection: Literal["local", "server"] = "local"
    """Where updates are projected: in every local step (local), or once on the aggregated update
    (server, the comparison of section 6.3)."""
    routing: Annotated[Literal["sample", "batch", "off"], UNQUOTED_OFF] = "sample"
    """How the task of a test example is predicted: from the example alone (sample), from its batch,
    which must be of one task (batch), or not at all (off, the paper's -t)."""
    router: Literal["references", "gaussian"] = "references"
    """references: the nearest pattern of relevances (the paper). gaussian: the largest density of
    Gaussian classes, from sums over features (not in the paper)."""
    router_layers: Annotated[PositiveInt, Fixed()] = 2
    """Layers that the Gaussian router sees: 1 for the final features alone, 2 also the inputs of
    the body's last layer (averaged over positions), and so on; never the examples themselves."""
    unknown: Annotated[Probability, Fixed()] = 0.0
    """With `router: gaussian`, the fraction of a Gaussian class's examples that may be taken for
    examples of no known task: those that lie farther from the mean. Then `route` returns -1, and
    the prediction is among the outputs of all tasks so far. 0: every example has a task."""
    routing_batch: Annotated[PositiveInt, Fixed()] = 64
    """Examples per batch with `routing: batch`."""
    space_rank: Annotated[PositiveInt | Literal["threshold"], Fixed()] = 20
    """Maximum number of feature directions that a task adds, unless there are more clients; or
    threshold, as many as eq. 8 asks for. At most half of those that are left."""
    drop_first: bool = False
    """Leave the first block out of the relevance vectors, as the authors' code does."""
    references: Literal["moments", "strict"] = "moments"
    """moments: exact for later blocks. strict: nothing is kept of old tasks, and their relevance to
    later blocks counts as zero."""
    pool_references: bool = False
    """Have one reference per task, of all clients' features together, instead of a vote of the
    clients. Always so with `transport: sketch`."""
    transport: Literal["bases", "sketch"] = "bases"
    """bases: the server sees each client's bases. sketch: only sums leave a client, and the
    threshold is applied to the sum: sketches with `bases: union` (eq. 40), and with pooled second
    moments of layers of up to 1024 inputs."""
    sketch_size: Annotated[PositiveInt, Fixed()] = 128
    """Columns of a layer's sketch (s_l)."""
    frozen: tuple[str, ...] = ()
    """Prefixes of parameters that are frozen after the first task (pretrained networks: conv1, bn1,
    layer1, layer2)."""
    diagnostics_: Annotated[bool, Field(alias="diagnostics")] = False
    """Estimate rho and beta of section 5 at each task's end."""

    title: ClassVar[str] = "FedProTIP"
    family: ClassVar[str] = "Projection"
    idea: ClassVar[str] = "Clients project every local step; a router predicts an example's task."
    paper: ClassVar[str] = "FedProTIP: Replay-Free Gradient Projection (under review)"
    ServerState: ClassVar[type] = FedProTIPState
    ClientState: ClassVar[type] = SecondMoments

    @property
    def needs(self) -> Needs:
        """Prefer one head per task on split streams; the server sees bases unless they are sums."""
        fields = ("bases",) if self.bases == "union" else ("bases", "directions")
        if self.uses_blocks and not self.pool_references:
            fields = (*fields, "references")
        return Needs(
            classes=True,
            prefers=Preferences(
                head={"split": "growing"},
                demanded={"head": _HEAD_REASON} if self.routing != "off" else {},
            ),
            stable_features=True,
            per_client_fields=fields if self.transport == "bases" else (),
            prediction_state=("blocks", "references") if self.uses_blocks else ("gaussians",),
            layers="protected",
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
    def layer_bases(self) -> LayerBases:
        """Return how clients' directions become one basis."""
        columns = self.sketch_size if self.transport == "sketch" else None
        return LayerBases(self.bases, self.rank_rule, columns)

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
            trainable=trainable_names(context, self.protected_layers(context.network)),
            batch_statistics=context.task == 0,
        )
        collect = Exchange(
            "bases", "all", self.send_protected, self.send_bases, self.extend_subspaces
        )
        if self.routing == "off":
            return [train, collect]
        if self.router == "gaussian":
            return [train, collect, gaussian_router.gaussians_exchange(self.router_layers)]
        summed = self.pool_references or self.transport == "sketch"
        return [train, collect, references_exchange(summed)]

    def project_steps(self, client: Client) -> Prepared:
        """Return the projection of gradients, with weight decay: g <- g - g Phi Phi^T (eq. 4)."""
        return Prepared(transforms=(ProjectOut(client.broadcast.get("spaces", {})),))

    def send_protected(self, server: Server, context: Context) -> Tree:
        """Send Phi^(1:t-1), and the feature directions of earlier blocks."""
        return send_subspaces(server, context) | blocks.feature_space_field(server.state.blocks)

    def send_bases(self, client: Client) -> ClientResult:
        """Send the principal directions of each layer's inputs outside Phi (eqs. 6 to 8)."""
        if self.routing != "off" and self.router == "gaussian":
            client = client.without_small_classes()  # else the difference of both would show them
        if not len(client.data):
            return ClientResult()
        generator, network = client.secret("bases"), client.context.network
        layers, state = self.protected_layers(network), None
        sampled = (*layers, feature_layer(network)) if self.uses_blocks else layers
        inputs = sample_layer_inputs(
            client, sampled, self.max_examples, self.max_columns, generator
        )
        threshold = self.threshold_at(client.context.task)
        fields, client_bases = self.layer_bases.describe(
            client, layers, inputs, threshold, generator
        )
        if self.uses_blocks:
            features, summed = inputs[FEATURES], self.transport == "sketch"
            client_bases[FEATURES] = blocks.feature_basis(
                client, features, self.space_rank, threshold, summed
            )
            state = client.state.with_task(client, features, self.references == "strict")
        if client_bases:
            fields["bases"] = bases.bases_field(
                client_bases, self.layer_bases.sketch_size, generator
            )
        if self.diagnostics_:
            fields["gradient"] = Sum(local_gradient(client, layers))
        return ClientResult(fields, state)

    def extend_subspaces(
        self, server: Server, uploads: CollectedUploads, context: Context
    ) -> Server:
        """Add the clients' directions to Phi (eq. 9: their union), and a block of features."""
        old, threshold = server.state, self.threshold_at(context.task)
        layers = self.protected_layers(context.network)
        spaces = self.layer_bases.extend(old.spaces, layers, uploads, threshold)
        bases.warn_without_bases(uploads, layers, context)
        new: Tree = {"spaces": spaces, "basis_bytes": bases.mean_basis_bytes(uploads)}
        if self.uses_blocks:
            new["blocks"] = blocks.add_block(
                old.blocks, uploads, context, self.space_rank, threshold
            )
        if self.diagnostics_ and uploads.has("gradient"):
            gradient = uploads.mean("gradient")
            new["geometry"] = old.geometry.with_task(context.task, gradient, old.spaces, spaces)
        return replace(server, state=replace(old, **new))

    def route(
        self, server: Server, x: Tensor, network: Network, client_state: Any = None
    ) -> Tensor | None:
        """Return the votes of the clients' references for each task (eqs. 10, 11)."""
        state = server.state
        if self.routing == "off" or not (state.references or state.gaussians):
            return None
        batch = self.routing_batch if self.routing == "batch" else None
        if self.router == "gaussian":
            rows = gaussian_router.router_features(server, x, network, self.router_layers)
            gaussians, outputs = state.gaussians, network.outputs
            return gaussian_router.task_scores(rows, gaussians, outputs, batch, self.unknown)
        features = network.features(server.params, x, ForwardPass(buffers=server.buffers))
        references, first = state.references, self.drop_first
        return routing.score_features(features, state.blocks, references, batch, first)

    def for_mixed_rows(self) -> FedProTIP:
        """Return the method with the task of each row predicted from the row alone."""
        return replace(self, routing="sample") if self.routing == "batch" else self

    def protected_layers(self, network: Network) -> tuple[Layer, ...]:
        """Return the layers whose updates are projected."""
        layers = layers_shared_by_tasks(network)
        return tuple(layer for layer in layers if not layer.name.startswith(self.frozen))

    def threshold_at(self, task: int) -> float:
        """Return epsilon_l of a task."""
        return bases.threshold_at(task, self.threshold, self.threshold_increment)

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        """Return the protected fraction of each layer, bytes, rho and beta, at a task's end.

        It warns of tasks that a router may not tell apart.
        """
        state = server.state
        warnings = alike_warnings(state.gaussians, context.network.outputs)
        if context.round < context.rounds:
            return Diagnosis(warnings=warnings)
        numbers: Tree = {
            "used": used_fraction(state.spaces, self.protected_layers(context.network)),
            "basis_bytes": state.basis_bytes,
            "routing": self.routing if self.routing == "off" else f"per {self.routing}",
        }
        if self.diagnostics_:
            numbers["geometry"] = {"rho": state.geometry.rho, "beta": state.geometry.beta}
        return Diagnosis(numbers, warnings)
