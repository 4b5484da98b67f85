"""FOT: the server takes out of each aggregated update what would disturb the inputs of old tasks.

Bakman, Yaldiz, Ezzeldin, Avestimehr: Federated Orthogonal Training: Mitigating Global Catastrophic
Forgetting in Continual Federated Learning, ICLR 2024.

Clients train as in FedAvg. FedProject (eqs. 5, 6): the server removes from the plain mean update of
each layer its part in the orthogonal set O. GPSE (eqs. 8 to 12), an extra round at each task's end:
each client sends the sketch A_i = X*_i G_i of its layer inputs outside O; the sum of the sketches
is all that the server needs to add the task's principal directions to O.

Ours: eq. 12 is read as the authors' code has it (see algebra.ranks.uncovered_rank), with an option
of true energy; nothing is added where the old set covers enough; biases and norms stand still after
the first task.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perdure.algebra.columns import Spread
from perdure.algebra.ranks import uncovered_rank
from perdure.algebra.sketches import gaussian_sketch
from perdure.algebra.subspaces import principal
from perdure.errors import bad_value
from perdure.federation.messages import Report, Sum
from perdure.methods.base import Client, Finish, Method, Place, Server
from perdure.methods.parts.activations import observe
from perdure.methods.parts.noise import SketchNoise
from perdure.methods.parts.projection import project, space_of, used, widen
from perdure.methods.parts.protection import protectable, still_trained
from perdure.models.layers import Layer
from perdure.models.network import Network
from perdure.trees import Tensors, Tree

log = logging.getLogger(__name__)
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class FOT(Method):
    """FedProject in every round, GPSE at every task's end.

    threshold, threshold_increment: the paper's th, and what is added to it with each task.
    rank_rule: paper (shares of norms, as in the authors' code) or energy (of squared norms).
    sampling: the sampling dimension s of a layer, as a multiple of its input size d (the paper: 5,
    or 1 for Permuted MNIST); one number, or one for each weight by name.
    mu: the server's step on the projected update (the paper's mu).
    layers: weights that FOT is applied to: all, first_half, second_half, or names (Table 14).
    others: what becomes of the rest after the first task: frozen, or finetune without protection.
    freeze_first: leave the first layer out of GPSE and freeze it after the first task, so that
    nothing computed from raw inputs is sent (section 5.2.2).
    train_norms: scales and shifts of norms go on being trained, unprotected, as in the paper.
    privacy: noise on the sketches, none, paper or standard, for (epsilon, delta) with sketches
    clipped to the norm `clip` (appendix H); see parts.noise for what may be claimed.
    """

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.95
    threshold_increment: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rank_rule: Literal["paper", "energy"] = "paper"
    sampling: Positive | dict[str, Positive] = 5.0
    mu: Positive = 1.0
    layers: Literal["all", "first_half", "second_half"] | list[str] = "all"
    others: Literal["frozen", "finetune"] = "frozen"
    freeze_first: bool = False
    train_norms: bool = False
    privacy: Literal["none", "paper", "standard"] = "none"
    epsilon: Positive = 5.0
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    clip: Positive = 1.0

    paper: ClassVar[str] = "Bakman et al., ICLR 2024"
    beside_prompts: ClassVar[bool] = False

    def refuse(self, config: Any) -> str | None:
        """Squared norms have no bound, so that no noise could hide a client's."""
        if self.privacy == "standard" and self.rank_rule == "energy":
            return "method.rank_rule: got 'energy', allowed with method.privacy 'standard': paper"
        return super().refuse(config)

    def preferred_head(self, stream: str) -> str:
        """A head for each task where tasks have classes of their own, as in the paper."""
        return "growing" if stream == "split" else "shared"

    def preferred_weighting(self) -> str:
        """The authors' server takes the plain mean of the selected clients' updates."""
        return "uniform"

    # ---- FedProject

    def start(self, params: Tensors, place: Place) -> Tree:
        """An empty orthogonal set O."""
        self.chosen(place.network)
        if self.noise:
            log.info("%s", self.noise.claim(len(self.chosen(place.network)), place.tasks))
        return {"spaces": {}}

    def trainable(self, params: Tensors, place: Place) -> tuple[str, ...]:
        """After the first task: projected weights, new heads, and what is to be fine-tuned."""
        names, chosen = super().trainable(params, place), self.chosen(place.network)
        loose: tuple[Layer, ...] = ()
        if self.others == "finetune":
            frozen = protectable(place.network)[:1] if self.freeze_first else ()
            loose = tuple(x for x in protectable(place.network) if x not in (*chosen, *frozen))
        return still_trained(names, place, chosen, loose, self.train_norms)

    def batch_statistics(self, place: Place) -> bool:
        """Running statistics stand still after the first task."""
        return place.task == 0 or self.train_norms

    def adjust(self, update: Tensors, server: Server, place: Place) -> tuple[Tensors, Tree]:
        """Eq. 6: delta <- delta - delta O O^T."""
        change = project(update, server.memory["spaces"])
        return {name: self.mu * value for name, value in change.items()}, server.memory

    # ---- GPSE

    def consolidates(self, place: Place) -> int:
        """One extra round after every task."""
        return 1

    def broadcast_lasting(self, server: Server, place: Place) -> Tree:
        """O, which clients need in GPSE."""
        spaces = server.memory["spaces"]
        return {"spaces": spaces} if spaces else {}

    def extract(self, client: Client) -> Finish:
        """Eqs. 8 and 9: X* = X - O O^T X, A_i = X* G; and the share of X outside O.

        X enters by a root of X X^T, which gives A_i the same law (see algebra.sketches).
        """
        chosen, spaces = self.chosen(client.place.network), client.received.get("spaces", {})
        held = {layer.name: Spread() for layer in chosen}
        observe(client, chosen, held, client.shard.index)
        sketches: Tensors = {}
        shares: Tensors = {}
        generator = client.draw("gpse")
        for layer in chosen:
            inputs = held[layer.name].root()
            outside = space_of(spaces, layer).residual(inputs)
            sketches[layer.name] = gaussian_sketch(outside, self.size(layer), generator)
            shares[layer.name] = self._share(outside, inputs)
        if self.noise:
            sketches, shares = self.noise.applied(sketches, shares, client.place.clients, generator)
        return Finish({"sketch": Sum(sketches, 1.0), "shares": Sum(shares, self._weight(client))})

    def _share(self, outside: Tensor, inputs: Tensor) -> Tensor:
        """||X*|| and ||X|| (energy: squared), or their ratio (paper), as one client's term."""
        norms = torch.stack([outside.double().norm(), inputs.double().norm()])
        if self.rank_rule == "energy":
            return norms.square()
        return (norms[0] / norms[1].clamp(min=1e-30)).float()

    def _weight(self, client: Client) -> float:
        """Ratios are averaged over samples (under noise: over clients), squares are added up."""
        plain = self.rank_rule == "paper" and self.privacy != "standard"
        return float(len(client.shard)) if plain else 1.0

    def absorb(self, server: Server, report: Report, place: Place) -> Server:
        """Eqs. 10 to 12: the principal directions of the summed sketches join O."""
        if "sketch" not in report.totals:
            return server
        spaces, sketches = server.memory["spaces"], report.total("sketch")
        for layer in self.chosen(place.network):
            directions, singular = principal(sketches[layer.name])
            uncovered = self._uncovered(report.mean("shares")[layer.name])
            rank = uncovered_rank(singular, self.threshold_at(place.task), uncovered)
            spaces = widen(spaces, layer, directions[:, :rank].to(sketches[layer.name]))
        sent = sum(sketch.nbytes for sketch in sketches.values())
        return Server(server.params, server.buffers, {"spaces": spaces, "sketch_bytes": sent})

    def _uncovered(self, share: Tensor) -> float:
        """Rho, the share of the inputs that O does not cover."""
        rho = share[0] / share[1].clamp(min=1e-30) if self.rank_rule == "energy" else share
        return min(1.0, max(0.0, float(rho)))

    # ---- the pieces

    @property
    def noise(self) -> SketchNoise | None:
        """The mechanism of appendix H, if it is asked for."""
        if self.privacy == "none":
            return None
        return SketchNoise(self.privacy, self.epsilon, self.delta, self.clip)

    def chosen(self, network: Network) -> tuple[Layer, ...]:
        """The layers that FOT is applied to."""
        every = protectable(network)
        half, names = len(every) // 2, [layer.name for layer in every]
        if isinstance(self.layers, list):
            for name in self.layers:
                if name not in names:
                    raise bad_value("method.layers", name, ", ".join(names))
            found = tuple(layer for layer in every if layer.name in self.layers)
        else:
            parts = {"all": every, "first_half": every[:half], "second_half": every[half:]}
            found = parts[self.layers]
        return tuple(x for x in found if not (self.freeze_first and x is every[0]))

    def size(self, layer: Layer) -> int:
        """The sampling dimension s of a layer."""
        factor = self.sampling
        if isinstance(factor, dict):
            factor = factor.get(layer.name, 5.0)
        return max(1, round(factor * layer.inputs))

    def threshold_at(self, task: int) -> float:
        """Th of a task."""
        return min(1.0, self.threshold + self.threshold_increment * task)

    def diagnose(self, server: Server, place: Place) -> Tree:
        """At a task's end: the share of each layer's space in use (Table 3, Figure 7); bytes."""
        if place.round < place.rounds:
            return {}
        spaces = server.memory["spaces"]
        shares = used(spaces, self.chosen(place.network))
        bases = sum(half.nbytes for space in spaces.values() for half in space.values())
        found: Tree = {
            "used": shares,
            "used_mean": sum(shares.values()) / max(1, len(shares)),
            "sketch_bytes": server.memory.get("sketch_bytes", 0),
            "basis_bytes": bases,
        }
        if self.noise:
            found["privacy"] = self.noise.claim(len(shares), place.tasks)
        return found

    def export(self, server: Server) -> Tree:
        """Prediction needs the model alone."""
        return {}
