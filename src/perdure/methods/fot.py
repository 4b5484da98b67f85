"""FOT: the server takes out of each aggregated update what would disturb the inputs of old tasks.

Bakman, Yaldiz, Ezzeldin, Avestimehr: Federated Orthogonal Training: Mitigating Global Catastrophic
Forgetting in Continual Federated Learning, ICLR 2024.

Clients train as in FedAvg. FedProject (eqs. 5, 6): the server removes from the plain mean update of
each layer, times mu (train.server_lr), its part in the orthogonal set O. GPSE (eqs. 8 to 12), an
exchange at each task's end: each client sends the sketch A_i = X*_i G_i of its layer inputs outside
O; the sum of the sketches is all that the server needs to add the task's principal directions to O.

Ours: eq. 12 is read as the authors' code has it (see algebra.ranks.uncovered_rank), with an option
of true energy; nothing is added where the old set covers enough; biases and norms are frozen after
the first task.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from perdure.algebra.rank_rules import uncovered_rank
from perdure.algebra.sketches import gaussian_sketch
from perdure.algebra.subspaces import principal_directions
from perdure.config.types import Fraction, PositiveFloat, Probability
from perdure.contract import (
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    Exchange,
    Method,
    Needs,
    Server,
    Sum,
    Train,
)
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts.bases import threshold_at
from perdure.methods.parts.layer_inputs import gram_roots
from perdure.methods.parts.protected_layers import (
    Subspaces,
    add_directions,
    layer_subspace,
    project_out_change,
    protectable_layers,
    select_layers,
    send_subspaces,
    trainable_names,
    used_fraction,
)
from perdure.methods.parts.shares import outside_fraction, outside_norms
from perdure.methods.parts.sketch_noise import SketchNoise
from perdure.models.layers import Layer
from perdure.models.network import Network

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProtectedState:
    """What the server keeps."""

    spaces: Subspaces = field(default_factory=dict)
    """O: by weight name the protected subspace of the layer's inputs."""
    sketch_bytes: int = 0
    """Bytes of one client's sketches in the last GPSE."""


@dataclass(frozen=True)
class FOT(Method):
    """FedProject in every round, GPSE at every task's end."""

    threshold: Fraction = 0.95
    """Fraction of a layer's input norm that the protected subspace must cover (the paper's th), in
    (0, 1]."""
    threshold_increment: Probability = 0.0
    """Added to `threshold` with each task."""
    rank_rule: Literal["paper", "energy"] = "paper"
    """How coverage is measured: fractions of norms (paper, as in the authors' code) or of squared
    norms (energy)."""
    sketch_ratio: PositiveFloat | dict[str, PositiveFloat] = 5.0
    """Columns of a layer's sketch per input of the layer (s / d; the paper: 5, or 1 for Permuted
    MNIST): one number, or one per weight by name."""
    layers: Literal["all", "first_half", "second_half"] | list[str] = "all"
    """Weights that FOT is applied to: all, first_half, second_half, or their names (Table 14)."""
    unprotected: Literal["frozen", "finetune"] = "frozen"
    """What happens to the other weights after the first task: frozen, or trained without protection
    (finetune)."""
    freeze_first: bool = False
    """Leave the first layer out of GPSE and freeze it after the first task, so that nothing
    computed from raw inputs is sent (section 5.2.2)."""
    train_norms: bool = False
    """Train scales and shifts of normalization layers after the first task, without protection, as
    in the paper."""
    sketch_noise: Literal["none", "paper", "standard"] = "none"
    """Noise on the sketches (appendix H): none, as printed in the paper (paper), or with an
    (epsilon, delta) guarantee (standard)."""
    epsilon: PositiveFloat = 5.0
    """Sketch noise: epsilon per task."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    """Sketch noise: delta."""
    clip: PositiveFloat = 1.0
    """Sketch noise: maximum norm of a client's sketch."""

    paper: ClassVar[str] = "Bakman et al., ICLR 2024"
    ServerState: ClassVar[type] = ProtectedState

    @property
    def needs(self) -> Needs:
        """Return the paper's setting: one head per task on split streams, plain means."""
        return Needs(
            head={"split": "growing"},
            weighting="uniform",
            trained_layers=True,
            stable_features=True,
        )

    def check_config(self, config: Any) -> str | None:
        """Refuse squared norms with noise: they have no bound, so that no noise could hide them."""
        if self.sketch_noise == "standard" and self.rank_rule == "energy":
            return (
                "method.rank_rule: must be paper with method.sketch_noise 'standard', got 'energy'"
            )
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Project in every round, estimate the task's subspace at its end."""
        chosen, loose = self.chosen(context.network), self.loose(context.network)
        train = Train(
            broadcast=send_subspaces,
            adjust=project_out_change,  # FedProject, eq. 6: delta <- delta - delta O O^T
            trainable=trainable_names(context, chosen, loose, self.train_norms),
            batch_statistics=context.task == 0 or self.train_norms,
        )
        gpse = Exchange("gpse", "all", send_subspaces, self.sketch, self.extend)
        if self.noise and context.task == 0:
            return [Exchange("claim", "none", aggregate=self.log_claim), train, gpse]
        return [train, gpse]

    def log_claim(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        """Log what the noise guarantees per task."""
        if self.noise:
            log.info("%s", self.noise.guarantee(len(self.chosen(context.network))))
        return server

    # ---- GPSE

    def sketch(self, client: Client) -> ClientResult:
        """Eqs. 8 and 9: X* = X - O O^T X, A_i = X* G_i; and the share of X outside O.

        X enters by a root of X X^T, which gives A_i the same law (see algebra.sketches).
        """
        chosen, spaces = self.chosen(client.context.network), client.broadcast.get("spaces", {})
        roots, generator = gram_roots(client, chosen), client.secret("gpse")
        sketches: Tensors = {}
        shares: Tensors = {}
        for layer in chosen:
            inputs = roots[layer.name]
            outside = layer_subspace(spaces, layer).project_out_columns(inputs)
            sketches[layer.name] = gaussian_sketch(outside, self.size(layer), generator)
            shares[layer.name] = outside_norms(outside, inputs, squared=self.rank_rule == "energy")
        if self.noise:
            clients = client.context.clients_with_data
            sketches, shares = self.noise.add_noise(sketches, shares, clients, generator)
        weight = self._share_weight(client)
        return ClientResult({"sketch": Sum(sketches, 1.0), "shares": Sum(shares, weight)})

    def _share_weight(self, client: Client) -> float:
        """Ratios are averaged over samples (under noise: over clients), squares are added up."""
        plain = self.rank_rule == "paper" and self.sketch_noise != "standard"
        return float(len(client.data)) if plain else 1.0

    def extend(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        """Eqs. 10 to 12: the principal directions of the summed sketches join O."""
        if not uploads.has("sketch"):
            return server
        spaces, sketches = server.state.spaces, uploads.total("sketch")
        shares = uploads.mean("shares")
        for layer in self.chosen(context.network):
            directions, singular = principal_directions(sketches[layer.name])
            threshold, rho = self.threshold_at(context.task), outside_fraction(shares[layer.name])
            rank = uncovered_rank(singular, threshold, rho)
            spaces = add_directions(spaces, layer, directions[:, :rank].to(sketches[layer.name]))
        sent = sum(sketch.nbytes for sketch in sketches.values())
        return replace(server, state=ProtectedState(spaces, sent))

    # ---- the pieces

    @property
    def noise(self) -> SketchNoise | None:
        """The mechanism of appendix H, if any."""
        if self.sketch_noise == "none":
            return None
        return SketchNoise(self.sketch_noise, self.epsilon, self.delta, self.clip)

    def chosen(self, network: Network) -> tuple[Layer, ...]:
        """Return the layers that FOT is applied to."""
        first = protectable_layers(network)[:1] if self.freeze_first else ()
        return tuple(layer for layer in select_layers(network, self.layers) if layer not in first)

    def loose(self, network: Network) -> tuple[Layer, ...]:
        """Return the layers that are still trained after the first task, without protection."""
        if self.unprotected == "frozen":
            return ()
        every, chosen = protectable_layers(network), self.chosen(network)
        return tuple(layer for layer in every[int(self.freeze_first) :] if layer not in chosen)

    def size(self, layer: Layer) -> int:
        """Return the sampling dimension s of a layer."""
        factor = self.sketch_ratio
        if isinstance(factor, dict):
            factor = factor.get(layer.name, 5.0)
        return max(1, round(factor * layer.inputs))

    def threshold_at(self, task: int) -> float:
        """Return th of a task."""
        return threshold_at(task, self.threshold, self.threshold_increment)

    def diagnostics(self, server: Server, context: Context) -> Tree:
        """Return at a task's end each layer's used share (Table 3, Figure 7), and bytes."""
        if context.round < context.rounds:
            return {}
        spaces, sent = server.state.spaces, server.state.sketch_bytes
        shares = used_fraction(spaces, self.chosen(context.network))
        bases = sum(half.nbytes for space in spaces.values() for half in space.values())
        mean = sum(shares.values()) / max(1, len(shares))
        found = {"used": shares, "used_mean": mean, "sketch_bytes": sent, "basis_bytes": bases}
        claim = (
            {"privacy": self.noise.guarantee(len(shares), context.task + 1)} if self.noise else {}
        )
        return found | claim
