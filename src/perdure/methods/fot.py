"""FOT: federated orthogonal training."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from perdure.algebra.sketches import gaussian_sketch, sketch_spectrum
from perdure.algebra.subspaces import uncovered_rank
from perdure.config.section import Fixed, Fraction, PositiveFloat, Search
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.method import Diagnosis
from perdure.contract.needs import Needs, Preferences
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts.protected_layers import (
    ChoosesLayers,
    Subspaces,
    add_directions,
    full_layers_warnings,
    gram_roots,
    layer_subspace,
    project_out_change,
    send_subspaces,
    used_fraction,
    warn_nothing_protected,
)
from perdure.methods.parts.sketches import EnergyRatio, NormRatios, SendsSketches
from perdure.models.layers import Layer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProtectedState:
    """Server state: the protected subspaces."""

    spaces: Subspaces = field(default_factory=dict)
    """O: by weight name an orthonormal basis of the protected subspace of the layer's inputs,
    {"basis": float [inputs, rank]}, or of its complement if that is smaller, {"free": ...}."""
    sketch_bytes: int = 0
    """Bytes of one client's sketches in the last GPSE."""
    drowned: list[str] = field(default_factory=list)
    """Weight names of the layers in whose summed sketch the last GPSE found nothing but noise."""


@dataclass(frozen=True)
class FOT(SendsSketches, ChoosesLayers):
    """Federated orthogonal training: the server projects each aggregated update.

    Clients train as in FedAvg. FedProject (eqs. 5 and 6): the server projects the plain mean update
    of each layer, times mu (`train.server_lr`), out of the protected subspace O of the layer's
    inputs. GPSE (eqs. 8 to 12), an exchange after each task: each client sends the sketch
    A_i = X*_i G_i of its layer inputs outside O, and the fraction of its inputs outside O.
    From the sums of both over clients the server adds the task's principal directions to O.

    Server state: `ProtectedState`.

    With noise on the sketches (`sketch_noise`, `privacy.noise`), directions whose singular value is
    below the largest one of noise alone are not added (see `algebra.sketches.noise_edge`).

    Differs from the paper: eq. 12 is implemented as in the authors' code (see
    `algebra.subspaces.uncovered_rank`), with the option of squared norms; no directions are added
    if O already covers enough; biases and norms are frozen after the first task.

    Reference: Bakman, Yaldiz, Ezzeldin, Avestimehr: Federated Orthogonal Training: Mitigating
    Global Catastrophic Forgetting in Continual Federated Learning, ICLR 2024.

    Example: `method: {kind: fot, threshold: 0.95}`
    """

    threshold: Annotated[Fraction, Search(0.6, 0.97)] = 0.8
    """Fraction of a layer's input norm that the protected subspace must cover (the paper's th, 0.87
    to 0.96 there), in (0, 1]. The default was chosen on validation rows of three small streams."""
    rank_rule: Literal["paper", "energy"] = "paper"
    """How coverage is measured: fractions of norms (paper, as in the authors' code) or of squared
    norms (energy)."""
    sketch_ratio: Annotated[PositiveFloat | dict[str, PositiveFloat], Fixed()] = 1.0
    """Columns of a layer's sketch per input of the layer (s / d; the paper: 5, or 1 for Permuted
    MNIST): one number, or one per weight by name. Fewer columns overstate what is covered, and take
    fewer bytes."""
    closing: bool = True
    """Run GPSE at each task's end. If false, it waits until the next task begins, so that a run's
    last task has none: the model is the same, with the uploads of one GPSE fewer. Clients must
    keep a task's data until the next task begins."""

    title: ClassVar[str] = "FOT"
    family: ClassVar[str] = "Projection"
    idea: ClassVar[str] = "The server projects updates out of earlier tasks' layer inputs."
    paper: ClassVar[str] = "Bakman et al., ICLR 2024"
    ServerState: ClassVar[type] = ProtectedState
    needs: ClassVar[Needs] = Needs(
        prefers=Preferences(head={"split": "shared"}, weighting="uniform"),  # plain means, eq. 5
        layers="protected",
        stable_features=True,
    )
    rho: ClassVar[dict[str, NormRatios | EnergyRatio]] = {
        "paper": NormRatios(), "energy": EnergyRatio(),
    }  # fmt: skip

    def check_config(self, config: Any) -> str | None:
        """Refuse squared norms with noise: they are unbounded, so noise cannot hide them."""
        if self.sketch_noise == "standard" and self.rank_rule == "energy":
            return (
                "method.rank_rule: must be paper with method.sketch_noise 'standard', got 'energy'"
            )
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Project in every round; extend the protected subspaces at the task's end."""
        layers, largest = self.protected_layers(context.network), self.rho[self.rank_rule].largest
        train = Train(
            broadcast=send_subspaces,
            adjust=project_out_change,  # FedProject, eq. 6: delta <- delta - delta O O^T
            trainable=self.trainable(context),
            batch_statistics=context.task == 0 or self.train_norms,
        )
        gpse = Exchange(
            "gpse", "all", send_subspaces, self.send_sketches, self.extend_subspaces,
            deferred=not self.closing,
            clip_norms={"shares": largest * math.sqrt(len(layers))} if largest and layers else {},
        )  # fmt: skip
        return [train, gpse]

    def send_sketches(self, client: Client) -> ClientResult:
        """Send A_i = X* G_i with X* = X - O O^T X (eqs. 8 and 9), and the fraction of X outside O.

        X is replaced by the symmetric root of X X^T, which gives A_i the same distribution (see
        `algebra.sketches`) and has no example as a column. G_i is secret: with it, anybody could
        solve the sum of sketches for X X^T.
        """
        layers, rho = self.protected_layers(client.context.network), self.rho[self.rank_rule]
        spaces, generator = client.broadcast.get("spaces", {}), client.secret("gpse")
        roots, sketches, fractions = gram_roots(client, layers), Tensors(), Tensors()
        for layer in layers:
            inputs = roots[layer.name]
            outside = layer_subspace(spaces, layer).project_out_columns(inputs)
            sketches[layer.name] = gaussian_sketch(outside, self.sketch_size(layer), generator)
            fractions[layer.name] = rho.term(outside, inputs)
        if self.noise:
            clients = client.context.clients_with_data
            sketches, fractions = self.noise.add_noise(sketches, fractions, clients, generator)
        by_examples = rho.by_examples and self.sketch_noise != "standard"  # counts have no noise
        weight = float(len(client.data)) if by_examples else 1.0
        return ClientResult({"sketch": Sum(sketches, 1.0), "shares": Sum(fractions, weight)})

    def extend_subspaces(
        self, server: Server, uploads: CollectedUploads, context: Context
    ) -> Server:
        """Add the principal directions of the summed sketches to O (eqs. 10 to 12)."""
        layers, threshold = self.protected_layers(context.network), self.threshold_at(context.task)
        if self.noise and context.task == 0:
            log.info("%s", self.noise.describe_guarantee(len(layers)))
        if not uploads.has("sketch"):
            warn_nothing_protected("fot", context, layers)
            return server
        sketches, fractions = uploads.total("sketch"), uploads.mean("shares")
        spaces, sigma, drowned = server.state.spaces, self.summed_noise(uploads, context), []
        for layer in layers:
            sketch = sketches[layer.name]
            rho = self.rho[self.rank_rule].fraction(fractions[layer.name])
            spectrum = sketch_spectrum(sketch, sigma, layer_subspace(spaces, layer))
            rank = uncovered_rank(spectrum.singular, threshold, rho, spectrum.energy)
            spaces = add_directions(spaces, layer, spectrum.directions[:, :rank].to(sketch))
            if sigma and not spectrum.rank and rho > 1 - threshold:
                drowned.append(layer.name)
        sketch_bytes = sum(sketch.nbytes for sketch in sketches.values())
        return replace(server, state=ProtectedState(spaces, sketch_bytes, drowned))

    def sketch_size(self, layer: Layer) -> int:
        """Return the number s of columns of a layer's sketch."""
        ratio = self.sketch_ratio
        if isinstance(ratio, dict):
            ratio = ratio.get(layer.name, 1.0)
        return max(1, round(ratio * layer.inputs))

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        """Return the protected fraction of each layer (Table 3, Figure 7), at a task's end.

        It warns of layers that can hardly learn, and of noise that drowns all directions.
        """
        state, spaces = server.state, server.state.spaces
        warnings = full_layers_warnings("fot", spaces, self.threshold_at(context.task))
        if state.drowned:
            warnings |= self.noise_warnings(state.drowned)
        if context.round < context.rounds:
            return Diagnosis(warnings=warnings)
        used = used_fraction(spaces, self.protected_layers(context.network))
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
