"""FedProTIP: gradient projection and task prediction from feature subspaces."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.method import Diagnosis
from perdure.contract.needs import Needs, Preferences
from perdure.contract.transforms import ProjectOut
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts.client_bases import mean_basis_bytes
from perdure.methods.parts.gaussian_router import alike_warnings
from perdure.methods.parts.protected_layers import (
    FEATURES,
    ProjectionRecord,
    Subspaces,
    add_directions,
    feature_layer,
    layers_shared_by_tasks,
    local_gradient,
    project_out_change,
    sample_layer_inputs,
    send_subspaces,
    trainable_names,
    used_fraction,
    warn_nothing_protected,
)
from perdure.methods.parts.routing import PredictsTasks, SecondMoments, feature_space
from perdure.models.layers import Layer
from perdure.models.network import Network

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
class FedProTIP(PredictsTasks):
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

    projection: Literal["local", "server"] = "local"
    """Where updates are projected: in every local step (local), or once on the aggregated update
    (server, the comparison of section 6.3)."""
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
        if self.feature_blocks and not self.pool_references:
            fields = (*fields, "references")
        return Needs(
            classes=True,
            prefers=Preferences(
                head={"split": "growing"},
                demanded={"head": _HEAD_REASON} if self.task_router else {},
            ),
            stable_features=True,
            per_client_fields=fields if self.transport == "bases" else (),
            prediction_state=("blocks", "references") if self.feature_blocks else ("gaussians",),
            layers="protected",
        )

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
        router = self.task_router
        return [train, collect, router.exchange()] if router else [train, collect]

    def project_steps(self, client: Client) -> Prepared:
        """Return the projection of gradients, with weight decay: g <- g - g Phi Phi^T (eq. 4)."""
        return Prepared(transforms=(ProjectOut(client.broadcast.get("spaces", {})),))

    def send_protected(self, server: Server, context: Context) -> Tree:
        """Send Phi^(1:t-1), and the feature directions of earlier blocks."""
        return send_subspaces(server, context) | feature_space(server.state.blocks)

    def send_bases(self, client: Client) -> ClientResult:
        """Send the principal directions of each layer's inputs outside Phi (eqs. 6 to 8)."""
        blocks, state = self.feature_blocks, None
        if self.task_router and not blocks:  # sums of classes would show small ones
            client = client.without_small_classes()
        if not len(client.data):
            return ClientResult()
        network, generator = client.context.network, client.secret("bases")
        layers, threshold = self.protected_layers(network), self.threshold_at(client.context.task)
        sampled = (*layers, feature_layer(network)) if blocks else layers
        inputs = sample_layer_inputs(
            client, sampled, self.max_examples, self.max_columns, generator
        )
        fields = self.layer_bases.send(client, layers, inputs, threshold, generator)
        if blocks:
            features = inputs[FEATURES]
            fields = blocks.send(fields, client, features, threshold, generator)
            state = client.state.with_task(client, features, self.references == "strict")
        if self.diagnostics_:
            fields["gradient"] = Sum(local_gradient(client, layers))
        return ClientResult(fields, state)

    def extend_subspaces(
        self, server: Server, uploads: CollectedUploads, context: Context
    ) -> Server:
        """Add the clients' directions to Phi (eq. 9: their union), and a block of features."""
        old, bases, blocks = server.state, self.layer_bases, self.feature_blocks
        layers, threshold = self.protected_layers(context.network), self.threshold_at(context.task)
        spaces = old.spaces
        if uploads.has(bases.field):
            for layer in layers:
                directions = bases.directions(uploads, layer, threshold)
                spaces = add_directions(spaces, layer, directions)
        else:
            warn_nothing_protected("fedprotip", context, layers)
        new: Tree = {"spaces": spaces, "basis_bytes": mean_basis_bytes(uploads)}
        if blocks:
            new["blocks"] = blocks.with_task(old.blocks, uploads, context, threshold)
        if self.diagnostics_ and uploads.has("gradient"):
            gradient = uploads.mean("gradient")
            new["geometry"] = old.geometry.with_task(context.task, gradient, old.spaces, spaces)
        return replace(server, state=replace(old, **new))

    def protected_layers(self, network: Network) -> tuple[Layer, ...]:
        """Return the layers whose updates are projected."""
        layers = layers_shared_by_tasks(network)
        return tuple(layer for layer in layers if not layer.name.startswith(self.frozen))

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
            "routing": f"per {self.routing}" if self.task_router else self.routing,
        }
        if self.diagnostics_:
            numbers["geometry"] = {"rho": state.geometry.rho, "beta": state.geometry.beta}
        return Diagnosis(numbers, warnings)
