"""Calibrate: refit the head over all classes seen, from Gaussians of their features.

Luo et al., No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID
Data (CCVR), NeurIPS 2021. Where tasks bring new classes, outputs of different tasks are never
trained against each other; what is lost is lost between tasks. At a task's end clients send counts,
totals and Gram matrices of their classes' features, as sums, and the server fits a new head:

    lda         logit_c = f^T S^-1 mean_c - mean_c^T S^-1 mean_c / 2 + log(n_c / n)
    quadratic   the log-density of a Gaussian with S_c = (class covariance + shared one) / 2
    ncm         logit_c = 2 f^T mean_c - |mean_c|^2: the nearest class mean

The closed form replaces CCVR's retraining on samples of the same Gaussians. Statistics of earlier
classes are of earlier bodies. `drift: linear` moves them: clients compute their current examples'
features with the body of the task before (F) and with the new one (F'), send F^T F and F^T F', and
the server maps means and covariances by

    A = argmin |F A - F'|^2 + r |A - I|^2 = (F^T F + r I)^-1 (F^T F' + r I)

with r = ridge tr(F^T F) / D. `drift: memory` computes them again from the examples that another
part keeps (experience replay), each of which stands for as many as were seen per stored one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from perdure.algebra.class_statistics import (
    discriminant_head,
    nearest_mean_head,
    quadratic_logits,
    shrink,
)
from perdure.config.section import Search
from perdure.contract.context import Client, Context, Server, warn_nothing_sent
from perdure.contract.exchanges import Exchange, OncePerTask, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.core.errors import UserError
from perdure.core.trees import Tensors
from perdure.methods.parts.closed_form import (
    ClassGaussians,
    client_class_sums,
    client_features,
    counts_of_task,
    fit_drift,
    stored_class_sums,
    warn_of_missing_classes,
)
from perdure.models.network import Network


@dataclass(frozen=True)
class CalibrateState:
    """Server state: Gaussians of all classes seen, in the features of the newest body."""

    count: Tensor | None = None
    """double [outputs]: examples of each output."""
    mean: Tensor | None = None
    """double [outputs, D]"""
    covariance: Tensor | None = None
    """double [outputs, D, D] for `quadratic`, else [1, D, D]: the shared one."""
    previous_params: Tensors = field(default_factory=dict)
    """The model at the last task's end, for `drift: linear`."""
    previous_buffers: Tensors = field(default_factory=dict)
    """Its running statistics."""


@dataclass(frozen=True)
class Calibrate(Method):
    """Head calibration as a part: combines with any method by `with: [{kind: calibrate}]`.

    Training is left alone; predictions use the refitted head. A client sends sums of its classes'
    features at the end of each task, and nothing in training.

    Differs from the paper: the head is fitted in closed form instead of by sampling, and statistics
    of earlier tasks may follow the drift of the body.
    Reference: Luo et al., No Fear of Heterogeneity, NeurIPS 2021 (CCVR).

    Example: `method: {kind: fot, with: [{kind: calibrate, head: quadratic}]}`
    """

    head: Literal["lda", "quadratic", "ncm"] = "lda"
    """`lda`: one covariance for all classes. `quadratic`: half the class's own, half shared, for
    bodies that hardly move. `ncm`: the nearest class mean; with `drift: none` the reference of a
    method's own features, as they were when each class was learned."""
    shrinkage: Annotated[float, Field(ge=0, le=1), Search(0.01, 0.5, log=True)] = 0.1
    """Fraction by which covariances move towards a multiple of the identity."""
    drift: Literal["none", "linear", "memory"] | None = None
    """How the Gaussians of earlier tasks follow the body as it changes: not at all (none), moved by
    a linear map (linear), or computed again from stored examples of another part (memory). Default:
    `memory` if a combined method stores examples (`Needs.stored_examples`), `none` if one keeps
    features stable (`Needs.stable_features`), else `linear`."""
    ridge: Annotated[float, Field(gt=0), Search(1e-4, 1e-1, log=True)] = 0.001
    """Pull of that map towards the identity, relative to the mean squared feature."""

    ServerState: ClassVar[type] = CalibrateState
    title: ClassVar[str] = "Calibrate"
    family: ClassVar[str] = "Calibration"
    idea: ClassVar[str] = "The head is refitted over all classes from Gaussians of their features."
    paper: ClassVar[str] = "Luo et al., NeurIPS 2021 (CCVR), in closed form"
    needs: ClassVar[Needs] = Needs(classes=True, prediction_state=("count", "mean", "covariance"))

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train as usual; gather statistics and refit the head at the task's end."""
        moves = self.drift_of(context) == "linear" and context.task > 0
        statistics = Exchange(
            "statistics",
            broadcast=self.send_body if moves else None,
            client_work=self.measure,
            aggregate=self.gather_gaussians,
        )
        return [Train(), statistics]

    def drift_of(self, context: Context) -> str:
        """Return `drift`, or its default beside the combined methods."""
        needs = context.needs
        if self.drift == "memory" and not needs.stored_examples:
            raise UserError(
                "method.drift: must be 'none' or 'linear' without a method that stores examples "
                "(er), got 'memory'"
            )
        if self.drift is not None:
            return self.drift
        if needs.stored_examples:
            return "memory"
        return "none" if needs.stable_features else "linear"

    def send_body(self, server: Server, context: Context) -> dict[str, Any]:
        """Send the model of the task before."""
        state = server.state
        model = {"params": state.previous_params, "buffers": state.previous_buffers}
        return {"body": OncePerTask(model)}

    def measure(self, client: Client) -> ClientResult:
        """Return the sums over the client's features, but for classes with too few rows."""
        client, per_class = client.without_small_classes(), self.head == "quadratic"
        sums = client_class_sums(client, per_class)
        if self.drift_of(client.context) == "memory":
            stored = stored_class_sums(client, per_class)
            sums |= {f"stored_{name}": value for name, value in stored.items()}
        if "body" in client.broadcast:
            old = client.broadcast["body"]
            earlier = replace(client, params=client.params | old["params"], buffers=old["buffers"])
            before, now = client_features(earlier), client_features(client)
            sums |= {"old_gram": before.T @ before, "cross": before.T @ now}
        return ClientResult({"features": Sum(sums, weight=1.0)})

    def gather_gaussians(
        self, server: Server, uploads: CollectedUploads, context: Context
    ) -> Server:
        """Join the new classes' Gaussians with the earlier ones, moved if the body drifted."""
        sums, old = uploads.total("features") if uploads.has("features") else None, server.state
        if sums is None or not sums["count"].sum():
            warn_nothing_sent("calibrate", context, "the trained head predicts")
            return server
        warn_of_missing_classes("calibrate", context, counts_of_task(sums["count"], context))
        new = ClassGaussians.from_sums(sums)
        if old.count is not None:
            earlier = ClassGaussians(old.count, old.mean, old.covariance)
            new = self.followed(earlier, sums).merged(new)
        follows = self.drift_of(context) == "linear"
        body = (server.params, server.buffers) if follows else ({}, {})
        return replace(server, state=CalibrateState(new.count, new.mean, new.covariance, *body))

    def followed(self, earlier: ClassGaussians, sums: Tensors) -> ClassGaussians:
        """Return the Gaussians of earlier tasks in the features of the new body."""
        if "cross" in sums:
            return earlier.moved(fit_drift(sums["old_gram"], sums["cross"], self.ridge))
        if "stored_count" in sums:
            names = ("count", "total", "gram")
            stored = ClassGaussians.from_sums({name: sums[f"stored_{name}"] for name in names})
            return earlier.replaced(stored)
        return earlier

    def predict_from_features(
        self, server: Server, features: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits of the refitted head.

        Before the first fit, and while a task trains whose outputs were not fitted yet, those of
        the trained head.
        """
        state = server.state
        outputs = network.outputs.count(len(network.outputs.task_classes) - 1)
        if state.count is None or len(state.count) != outputs:
            return super().predict_from_features(server, features, network)
        if self.head == "ncm":
            return nearest_mean_head(state.mean, state.count).logits(features)
        classes = ClassGaussians(state.count, state.mean, state.covariance)
        if self.head == "lda":
            covariance = shrink(classes.shared_covariance(), self.shrinkage)
            return discriminant_head(state.count, state.mean, covariance).logits(features)
        covariances = classes.half_shared_covariances(self.shrinkage)
        return quadratic_logits(features, state.count, state.mean, covariances)
