"""FedProTIP: projection in every local step, and task identity from subspaces of the features.

FedProTIP: Task-Agnostic Federated Continual Learning via Replay-Free Gradient Projection
(anonymous authors, under double-blind review).

Training (section 4.1): clients project each gradient away from the core bases Phi^(1:t-1) of old
tasks. Bases (4.2, 4.3), an extra round at a task's end: each client sends the principal directions
of its layer inputs outside Phi; the server adds their union. Task identity (4.4), a second extra
round: clients send how strongly the features of each of their tasks lie in each task's block of
feature directions; a test example goes to the task whose pattern is nearest.

Ours: clients extract in parallel against Phi^(1:t-1) and the union does not depend on their order;
weight decay is projected with the gradient; biases and norms stand still after the first task, and
a shared head is protected like any layer; references come from second moments of features, which
clients keep instead of activations and never send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perdure.algebra.ranks import energy_rank
from perdure.algebra.sketches import gaussian_sketch
from perdure.algebra.subspaces import principal
from perdure.federation.messages import Each, Report, Sum, Upload
from perdure.methods.base import Client, Finish, Method, Place, Server
from perdure.methods.parts import geometry, routing
from perdure.methods.parts.bases import (
    CoreBasis,
    RankRule,
    core_basis,
    gpm_rule,
    mass_rule,
    sampled_inputs,
    sent_bytes,
)
from perdure.methods.parts.projection import (
    project,
    project_step,
    projectors,
    space_of,
    used,
    widen,
)
from perdure.methods.parts.protection import FEATURES, feature_layer, protectable, still_trained
from perdure.methods.parts.references import gathered_references, kept_moments, sent_references
from perdure.models.layers import Layer
from perdure.models.network import Network
from perdure.models.passes import Pass
from perdure.numbers import UNQUOTED_OFF
from perdure.trees import Tensors, Tree

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class FedProTIP(Method):
    """Local projection, core bases and routing.

    threshold, threshold_increment: the paper's epsilon_l, and what is added to it with each task.
    The paper has 0.7 (pretrained nets) and 0.95 (from scratch) with 5 clients; the space grows with
    the union over clients, so that many clients with little data want less.
    rank_rule: gpm (squared norms, old and new directions together: the published behaviour) or mass
    (the letter of eq. 8).
    columns: m_s, input columns a layer that a client decomposes; images: examples they come from.
    projection: local (every step) or server (only the aggregated update, the comparison of 6.3).
    routing: the task of a test example from the example alone (sample), from the batch it is in,
    which must be of one task (batch, of routing_batch examples), or off, the paper's (-t).
    space_rank: feature directions a task adds in all, at least one a client.
    drop_first: leave the first block out of the relevance vectors, as the authors' code does.
    references: moments (exact for later blocks) or strict (nothing is kept of old tasks: their
    relevance to later blocks counts as zero).
    transport: bases (the server sees each client's) or sketch (eq. 40: only sums leave a client).
    sketch_size: s_l, columns of a sketch.
    frozen: prefixes of parameters that stand still after the first task (pretrained nets: conv1,
    bn1, layer1, layer2).
    diagnostics: estimate rho and beta of section 5 at each task's end.
    """

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.6
    threshold_increment: Annotated[float, Field(ge=0, lt=1)] = 0.001
    rank_rule: Literal["gpm", "mass"] = "gpm"
    columns: Count = 512
    images: Count = 1280
    projection: Literal["local", "server"] = "local"
    routing: Annotated[Literal["sample", "batch", "off"], UNQUOTED_OFF] = "sample"
    routing_batch: Count = 64
    space_rank: Count = 20
    drop_first: bool = False
    references: Literal["moments", "strict"] = "moments"
    transport: Literal["bases", "sketch"] = "bases"
    sketch_size: Count = 128
    frozen: tuple[str, ...] = ()
    diagnostics: bool = False

    paper: ClassVar[str] = "FedProTIP: Replay-Free Gradient Projection (under review)"
    beside_prompts: ClassVar[bool] = False

    def refuse(self, config: Any) -> str | None:
        """In a pool stream a task is not one distribution, so there is nothing to tell."""
        if config.stream.kind == "pool" and self.routing != "off":
            return f"method.routing: got {self.routing!r}, allowed on a pool stream: off"
        return super().refuse(config)

    def preferred_head(self, stream: str) -> str:
        """A head for each task where tasks have classes of their own."""
        return "growing" if stream == "split" else "shared"

    # ---- training: projection

    def start(self, params: Tensors, place: Place) -> Tree:
        """No bases yet."""
        return {"spaces": {}, "blocks": {}, "feature_space": {}, "references": {}}

    def trainable(self, params: Tensors, place: Place) -> tuple[str, ...]:
        """After the first task: projected weights and the task's head."""
        names = super().trainable(params, place)
        return still_trained(names, place, self.protected(place.network))

    def batch_statistics(self, place: Place) -> bool:
        """Running statistics stand still after the first task."""
        return place.task == 0

    def broadcast_lasting(self, server: Server, place: Place) -> Tree:
        """Phi^(1:t-1), once a task."""
        spaces = server.memory["spaces"]
        return {"spaces": spaces} if spaces else {}

    def gradient(self, grads: Tensors, params: Tensors, received: Tree, own: Tensors) -> Tensors:
        """Eq. 4: g <- g - g Phi Phi^T, weight decay included."""
        return project(grads, self._phi(received))

    def _phi(self, received: Tree) -> Tree:
        """The spaces that local steps are kept out of."""
        if self.projection == "server":
            return {}
        found: Tree = received.get("projectors") or received.get("spaces", {})
        return found

    def derive(self, received: Tree) -> Tree:
        """Phi in the form that is quickest to project with."""
        spaces = received.get("spaces")
        return {"projectors": projectors(spaces)} if spaces and self.projection == "local" else {}

    def guards(self, received: Tree) -> dict[str, Tensors]:
        """Phi: eq. 4 may as well be had by projecting the layers' inputs."""
        return self._phi(received)

    def settles(self, optimizer: str) -> bool:
        """Sums of projected gradients are projected; steps that scale each entry are not."""
        return self.projection == "local" and optimizer != "sgd"

    def settle(
        self, params: Tensors, before: Tensors, received: Tree, own: Tensors, lr: float
    ) -> Tensors:
        """The step of an adaptive optimiser, projected."""
        return project_step(params, before, self._phi(received))

    def adjust(self, update: Tensors, server: Server, place: Place) -> tuple[Tensors, Tree]:
        """The server variant's only projection; otherwise it removes what rounding left."""
        return project(update, server.memory["spaces"]), server.memory

    # ---- the extra rounds

    def shown_fields(self) -> tuple[str, ...]:
        """Bases and references, unless they travel as sums."""
        if self.transport == "sketch":
            return ()
        return ("bases",) if self.routing == "off" else ("bases", "references")

    def consolidates(self, place: Place) -> int:
        """One round for the bases; one for the references, which need the task's global block."""
        return 1 if self.routing == "off" else 2

    def broadcast(self, server: Server, place: Place) -> Tree:
        """In the extra rounds: which feature directions are taken, then all tasks' blocks."""
        memory = server.memory
        if place.round < place.rounds or self.routing == "off":
            return {}
        if place.extra == 1:
            return {"blocks": memory["blocks"]}
        return {"feature_space": memory["feature_space"]} if memory["feature_space"] else {}

    def extract(self, client: Client) -> Finish:
        """Bases in the first extra round, references in the second."""
        if client.place.extra == 1:
            sums = self.transport == "sketch"
            return Finish(sent_references(client, client.received["blocks"], sums))
        generator, network = client.draw("bases"), client.place.network
        layers = self.observed(network)
        inputs = sampled_inputs(client, layers, self.images, self.columns, generator)
        bases = {layer.name: self._basis(client, layer, inputs[layer.name]) for layer in layers}
        upload = dict(self._send_bases(bases, generator))
        if self.diagnostics:
            upload["gradient"] = Sum(geometry.local_gradient(client, self.protected(network)))
        if self.routing == "off":
            return Finish(upload)
        strict = self.references == "strict"
        return Finish(upload, kept_moments(client, inputs[FEATURES], strict))

    def _basis(self, client: Client, layer: Layer, inputs: Tensor) -> CoreBasis:
        place, received = client.place, client.received
        if layer.name == FEATURES:
            rank = max(1, self.block_rank(place) // max(1, place.clients))
            space = space_of(received.get("feature_space", {}), layer)
            return core_basis(inputs, space, lambda singular, total: rank)
        return core_basis(
            inputs, space_of(received.get("spaces", {}), layer), self.rule(place.task)
        )

    def _send_bases(self, bases: dict[str, CoreBasis], generator: torch.Generator) -> Upload:
        """U_k; or eq. 40: B_k = U_k diag(s_k) G_k.

        G_k = U_k^T G has the same law, and B_k then no signs of U_k that rounding could turn.
        """
        if self.transport == "bases":
            return {"bases": Each({name: basis.directions for name, basis in bases.items()})}
        sketches = {
            name: gaussian_sketch(
                (basis.directions * basis.singular) @ basis.directions.T,
                self.sketch_size, generator,
            )
            for name, basis in bases.items()
        }  # fmt: skip
        return {"bases": Sum(sketches, 1.0)}

    def absorb(self, server: Server, report: Report, place: Place) -> Server:
        """Eq. 9 in the first extra round; the references in the second."""
        memory = server.memory
        if place.extra == 1:
            new = {"references": gathered_references(memory["references"], report)}
        else:
            new = self._absorb_bases(memory, report, place)
        return Server(server.params, server.buffers, memory | new)

    def _absorb_bases(self, memory: Tree, report: Report, place: Place) -> Tree:
        """Phi^(1:t), the task's block of feature directions, and what was asked for besides."""
        spaces = memory["spaces"]
        for layer in self.protected(place.network):
            spaces = widen(spaces, layer, self._candidates(report, layer.name, place))
        found: Tree = {"spaces": spaces, "basis_bytes": sent_bytes(report, "bases")}
        if self.routing != "off":
            layer, task = feature_layer(place.network), str(place.task)
            taken = space_of(memory["feature_space"], layer)
            wider, block = taken.extended(self._candidates(report, FEATURES, place))
            found["feature_space"] = {FEATURES: wider.tree()}
            found["blocks"] = memory["blocks"] | {task: block}
        if self.diagnostics:
            gradient = report.mean("gradient")
            found["geometry"] = geometry.noted(memory, spaces, gradient, place.task)
        return found

    def _candidates(self, report: Report, name: str, place: Place) -> Tensor:
        """The clients' directions side by side, or the principal ones of their summed sketch."""
        if self.transport == "bases":
            return torch.cat([bases[name] for bases in report.each["bases"].values()], dim=1)
        sketch = report.total("bases")[name]
        directions, singular = principal(sketch)
        total = float(singular.square().sum())
        rank = energy_rank(singular, self.threshold_at(place.task), total)
        if name == FEATURES:
            rank = self.block_rank(place)
        return directions[:, :rank].to(sketch)

    # ---- inference

    def route(self, server: Server, x: Tensor, network: Network) -> Tensor | None:
        """The task of each row by majority vote of the clients' references."""
        if self.routing == "off" or not server.memory.get("references"):
            return None
        blocks = routing.block_list(server.memory["blocks"])
        features = network.features(server.params, x, Pass(buffers=server.buffers))
        relevances = routing.relevance(features, blocks)
        if self.routing == "batch":
            relevances = routing.pooled(relevances, self.routing_batch)
        references = routing.stacked(server.memory["references"], len(blocks))
        return routing.identify(relevances, references, self.drop_first)

    def export(self, server: Server) -> Tree:
        """Blocks and references: what routing needs."""
        return {name: server.memory[name] for name in ("blocks", "references")}

    # ---- the pieces

    def protected(self, network: Network) -> tuple[Layer, ...]:
        """The layers that are projected."""
        return tuple(x for x in protectable(network) if not x.name.startswith(self.frozen))

    def observed(self, network: Network) -> tuple[Layer, ...]:
        """The layers whose inputs a client decomposes."""
        own = self.protected(network)
        return own if self.routing == "off" else (*own, feature_layer(network))

    def rule(self, task: int) -> RankRule:
        """The rank rule of a task."""
        rule = gpm_rule if self.rank_rule == "gpm" else mass_rule
        return rule(self.threshold_at(task))

    def threshold_at(self, task: int) -> float:
        """epsilon_l of a task."""
        return min(1.0, self.threshold + self.threshold_increment * task)

    def block_rank(self, place: Place) -> int:
        """Feature directions of a task in all, so that all tasks find room."""
        return max(1, min(self.space_rank, place.network.feature_size // place.tasks))

    def diagnose(self, server: Server, place: Place) -> Tree:
        """At a task's end: the share of each layer's space in use, bytes, rho and beta."""
        if place.round < place.rounds:
            return {}
        memory = server.memory
        found: Tree = {
            "used": used(memory["spaces"], self.protected(place.network)),
            "basis_bytes": memory.get("basis_bytes", 0),
            "routing": self.routing if self.routing == "off" else f"per {self.routing}",
        }
        if "geometry" in memory:
            found["geometry"] = {key: memory["geometry"][key] for key in ("rho", "beta")}
        return found
