"""FOT: federated orthogonal training."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from perdure.algebra.sketches import gaussian_sketch
from perdure.algebra.subspaces import uncovered_rank
from perdure.config.section import Fixed, Fraction, PositiveFloat, Probability, Search
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.method import Diagnosis, Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts.bases import gram_roots, threshold_at
from perdure.methods.parts.closed_form import warn_nothing_sent
from perdure.methods.parts.protected_layers import (
    Subspaces,
    add_directions,
    full_layers_warnings,
    layer_subspace,
    layers_shared_by_tasks,
    noise_warning,
    outside_fraction,
    outside_norms,
    project_out_change,
    select_layers,
    send_subspaces,
    trainable_names,
    used_fraction,
)
from perdure.methods.parts.sketches import SketchNoise, sketch_spectrum
from perdure.models.layers import Layer
from perdure.models.network import Network

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProtectedState:
    """Server state: the protected subspaces."""

    spaces: Subspaces = field(default_factory=dict)
    """O: by weight name the protected subspace of the layer's inputs."""
    sketch_bytes: int = 0
    """Bytes of one client's sketches in the last GPSE."""
    drowned: list[str] = field(default_factory=list)
    """Weight names of the layers in whose summed sketch the last GPSE found nothing but noise."""


@dataclass(frozen=True)
class FOT(Method):
    """Federated orthogonal training: the server projects each aggregated update.

    Clients train as in FedAvg. FedProject (eqs. 5 and 6): the server projects the plain mean update
    of each layer, times mu (`train.server_lr`), out of the protected subspace O of the layer's
    inputs. GPSE (eqs. 8 to 12), an exchange after each task: each client sends the sketch
    A_i = X*_i G_i of its layer inputs outside O, and the fraction of its inputs outside O.
    From the sums of both over clients the server adds the task's principal directions to O.

    Server state:
        spaces: by weight name, {"basis": float [inputs, rank]} or {"free": float [inputs, inputs -
            rank]}, an orthonormal basis of O or of its complement, whichever is smaller.
        sketch_bytes: int. Bytes of one client's sketches in the last GPSE.
        drowned: list of weight names. Layers of which the last GPSE found nothing but noise.

    With noise on the sketches (`sketch_noise`, `privacy.noise`), directions whose singular value is
    below the largest one of noise alone are not added (see `algebra.noise_edge`).

    Differs from the paper: eq. 12 is implemented as in the authors' code (see
    `algebra.rank_rules.uncovered_rank`), with the option of squared norms; no directions are added
    if O already covers enough; biases and norms are frozen after the first task.

    Reference: Bakman, Yaldiz, Ezzeldin, Avestimehr: Federated Orthogonal Training: Mitigating
    Global Catastrophic Forgetting in Continual Federated Learning, ICLR 2024.

    Example: `method: {kind: fot, threshold: 0.95}`
    """

    threshold: Annotated[Fraction, Search(0.6, 0.97)] = 0.8
    """Fraction of a layer's input norm that the protected subspace must cover (the paper's th, 0.87
    to 0.96 there), in (0, 1]. The default was chosen on validation rows of three small streams."""
    threshold_increment: Annotated[Probability, Fixed()] = 0.0
    """Added to `threshold` with each task."""
    rank_rule: Literal["paper", "energy"] = "paper"
    """How coverage is measured: fractions of norms (paper, as in the authors' code) or of squared
    norms (energy)."""
    sketch_ratio: Annotated[PositiveFloat | dict[str, PositiveFloat], Fixed()] = 1.0
    """Columns of a layer's sketch per input of the layer (s / d; the paper: 5, or 1 for Permuted
    MNIST): one number, or one per weight by name. Fewer columns overstate what is covered, and take
    fewer bytes."""
    layers: Literal["all", "first_half", "second_half"] | list[str] = "all"
    """Weights that FOT is applied to: all, first_half, second_half, or their names (Table 14)."""
    unprotected: Literal["frozen", "finetune"] = "frozen"
    """What happens to the other weights after the first task: frozen, or trained without protection
    (finetune)."""
    freeze_first: bool = False
    """Leave the first layer out of GPSE and freeze it after the first task, so that nothing
    computed from raw inputs is sent (section 5.2.2)."""
    closing: bool = True
    """Run GPSE at each task's end. If false, it waits until the next task begins, so that a run's
    last task has none: the model is the same, with the uploads of one GPSE fewer. Clients must
    keep a task's data until the next task begins."""
    train_norms: bool = False
    """Train scales and shifts of normalization layers after the first task, without protection, as
    in the paper."""
    sketch_noise: Literal["none", "paper", "standard"] = "none"
    """Noise on the sketches (appendix H): none, as printed in the paper (paper), or with an
    (epsilon, delta) guarantee (standard)."""
    epsilon: Annotated[PositiveFloat, Fixed()] = 5.0
    """Sketch noise: epsilon per task."""
    delta: Annotated[float, Field(gt=0, lt=1), Fixed()] = 1e-5
    """Sketch noise: delta."""
    clip: Annotated[PositiveFloat, Fixed()] = 1.0
    """Sketch noise: maximum norm of a client's sketch."""

    title: ClassVar[str] = "FOT"
    family: ClassVar[str] = "Projection"
    idea: ClassVar[str] = "The server projects updates out of earlier tasks' layer inputs."
    paper: ClassVar[str] = "Bakman et al., ICLR 2024"
    ServerState: ClassVar[type] = ProtectedState
    needs: ClassVar[Needs] = Needs(
        prefers=Preferences(head={"split": "shared"}, weighting="uniform"),
        layers="protected",
        stable_features=True,
    )

    def check_config(self, config: Any) -> str | None:
        """Refuse squared norms with noise: they are unbounded, so noise cannot hide them."""
        if self.sketch_noise == "standard" and self.rank_rule == "energy":
            return (
                "method.rank_rule: must be paper with method.sketch_noise 'standard', got 'energy'"
            )
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Project in every round; extend the protected subspaces at the task's end."""
        protected = self.protected_layers(context.network)
        unprotected = self.unprotected_layers(context.network)
        train = Train(
            broadcast=send_subspaces,
            adjust=project_out_change,  # FedProject, eq. 6: delta <- delta - delta O O^T
            trainable=trainable_names(context, protected, unprotected, self.train_norms),
            batch_statistics=context.task == 0 or self.train_norms,
        )
        gpse = Exchange(
            "gpse", "all", send_subspaces, self.send_sketches, self.extend_subspaces,
            deferred=not self.closing, clip_norms=self.fraction_norms(protected),
        )  # fmt: skip
        return [train, gpse]

    # ---- GPSE

    def send_sketches(self, client: Client) -> ClientResult:
        """Send A_i = X* G_i with X* = X - O O^T X (eqs. 8 and 9), and the fraction of X outside O.

        X is replaced by the symmetric root of X X^T, which gives A_i the same distribution (see
        `algebra.sketches`) and has no example as a column. G_i is secret: with it, anybody could
        solve the sum of sketches for X X^T.
        """
        layers = self.protected_layers(client.context.network)
        spaces, squared = client.broadcast.get("spaces", {}), self.rank_rule == "energy"
        roots, generator = gram_roots(client, layers), client.secret("gpse")
        sketches: Tensors = {}
        fractions: Tensors = {}
        for layer in layers:
            inputs = roots[layer.name]
            outside = layer_subspace(spaces, layer).project_out_columns(inputs)
            sketches[layer.name] = gaussian_sketch(outside, self.sketch_size(layer), generator)
            fractions[layer.name] = outside_norms(outside, inputs, squared)
        if self.noise:
            clients = client.context.clients_with_data
            sketches, fractions = self.noise.add_noise(sketches, fractions, clients, generator)
        weight = self._fraction_weight(client)
        return ClientResult({"sketch": Sum(sketches, 1.0), "shares": Sum(fractions, weight)})

    def _fraction_weight(self, client: Client) -> float:
        """Return the weight of a fraction: examples for ratios, 1 with noise or for squares."""
        weights_by_examples = self.rank_rule == "paper" and self.sketch_noise != "standard"
        return float(len(client.data)) if weights_by_examples else 1.0

    def fraction_norms(self, layers: tuple[Layer, ...]) -> dict[str, float]:
        """Return the largest norm of a client's fractions, one in [0, 1] per layer.

        Squared norms have no bound that is known beforehand.
        """
        return {"shares": math.sqrt(len(layers))} if self.rank_rule == "paper" and layers else {}

    def extend_subspaces(
        self, server: Server, uploads: CollectedUploads, context: Context
    ) -> Server:
        """Add the principal directions of the summed sketches to O (eqs. 10 to 12)."""
        if self.noise and context.task == 0:
            layers = self.protected_layers(context.network)
            log.info("%s", self.noise.describe_guarantee(len(layers)))
        if not uploads.has("sketch"):
            names = ", ".join(layer.name for layer in self.protected_layers(context.network))
            warn_nothing_sent("fot", context, f"nothing of the task is protected in {names}")
            return server
        spaces, sketches = server.state.spaces, uploads.total("sketch")
        fractions, threshold = uploads.mean("shares"), self.threshold_at(context.task)
        sigma, drowned = self.summed_noise(uploads, context), []
        for layer in self.protected_layers(context.network):
            sketch, rho = sketches[layer.name], outside_fraction(fractions[layer.name])
            spectrum = sketch_spectrum(sketch, sigma, layer_subspace(spaces, layer))
            rank = uncovered_rank(spectrum.singular, threshold, rho, spectrum.energy)
            spaces = add_directions(spaces, layer, spectrum.directions[:, :rank].to(sketch))
            if sigma and not spectrum.rank and rho > 1 - threshold:
                drowned.append(layer.name)
        sketch_bytes = sum(sketch.nbytes for sketch in sketches.values())
        return replace(server, state=ProtectedState(spaces, sketch_bytes, drowned))

    def summed_noise(self, uploads: CollectedUploads, context: Context) -> float:
        """Return the standard deviation of all noise on the entries of a summed sketch.

        Where `privacy.clip` scales noise down that clients added before, it is less.
        """
        added, counted = uploads.noise.get("sketch", 0.0), len(uploads.clients)
        if not self.noise:
            return added
        sigma = self.noise.sigma(context.clients_with_data, self.clip)
        return math.hypot(added, sigma * math.sqrt(counted))

    # ---- layers, sizes, thresholds

    @property
    def noise(self) -> SketchNoise | None:
        """The mechanism of appendix H. None if sketches have no noise."""
        if self.sketch_noise == "none":
            return None
        return SketchNoise(self.sketch_noise, self.epsilon, self.delta, self.clip)

    def protected_layers(self, network: Network) -> tuple[Layer, ...]:
        """Return the layers whose updates are projected."""
        first = layers_shared_by_tasks(network)[:1] if self.freeze_first else ()
        return tuple(layer for layer in select_layers(network, self.layers) if layer not in first)

    def unprotected_layers(self, network: Network) -> tuple[Layer, ...]:
        """Return the layers that are trained after the first task without protection."""
        if self.unprotected == "frozen":
            return ()
        layers, protected = layers_shared_by_tasks(network), self.protected_layers(network)
        return tuple(layer for layer in layers[int(self.freeze_first) :] if layer not in protected)

    def sketch_size(self, layer: Layer) -> int:
        """Return the number s of columns of a layer's sketch."""
        ratio = self.sketch_ratio
        if isinstance(ratio, dict):
            ratio = ratio.get(layer.name, 1.0)
        return max(1, round(ratio * layer.inputs))

    def threshold_at(self, task: int) -> float:
        """Return th of a task."""
        return threshold_at(task, self.threshold, self.threshold_increment)

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        """Return the protected fraction of each layer (Table 3, Figure 7), at a task's end.

        It warns of layers that can hardly learn, and of noise that drowns all directions.
        """
        state, spaces = server.state, server.state.spaces
        used = used_fraction(spaces, self.protected_layers(context.network))
        key = "method.sketch_noise" if self.noise else "privacy.noise"
        full = full_layers_warnings("fot", used, self.threshold_at(context.task))
        warnings = full | noise_warning(key, state.drowned)
        if context.round < context.rounds:
            return Diagnosis(warnings=warnings)
        numbers: Tree = {
            "used": used,
            "used_mean": sum(used.values()) / max(1, len(used)),
            "sketch_bytes": state.sketch_bytes,
            "basis_bytes": sum(b.nbytes for space in spaces.values() for b in space.values()),
        }
        releases = context.task + int(self.closing)
        if self.noise and releases:
            numbers["privacy"] = self.noise.describe_guarantee(len(used), releases)
        return Diagnosis(numbers, warnings)
