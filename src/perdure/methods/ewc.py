"""EWC: elastic weight consolidation on every client."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, vmap

from perdure.config.section import Fixed, NonNegativeFloat, PositiveInt, Search
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.method import Diagnosis, Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.step import Batch, mask_inactive, target_losses
from perdure.contract.transforms import Proximal
from perdure.contract.uploads import ClientResult
from perdure.core.errors import UserError
from perdure.core.trees import Tensors
from perdure.models.ops import ForwardPass

_BATCH_ROWS = 64
"""Examples whose gradients are computed together."""


@dataclass(frozen=True)
class FisherSums:
    """Client state: sums over earlier tasks, by parameter name and of the parameter's shape."""

    fisher: Tensors = field(default_factory=dict)
    """sum_j F^j: Fisher information."""
    pull: Tensors = field(default_factory=dict)
    """Fisher information times the parameters towards which it pulls."""


@dataclass(frozen=True)
class Ewc(Method):
    """Elastic weight consolidation: clients restrain the weights that their earlier tasks need.

    In task k client m adds to its loss the penalty
        (lambda / 2) sum_{j < k} sum_i F^j_{m,i} (theta_i - a_i)^2,
    where F^j_m is the diagonal of the Fisher information on the client's examples of task j, at the
    global model theta^j of that task's end, and a is the model of the end of the client's latest
    task (`anchor: latest`), or of each task, a = theta^j (`anchor: each`). The client stores only
    the sums over tasks of F^j and F^j a. Uploads are those of FedAvg.

    With an anchor for each task, weights that task 1 needs are pulled back to theta^1 while task 3
    is trained, away from where task 2 needs them: task 2 is forgotten. The latest model balances
    all earlier tasks already (Huszar's derivation).

    With `step: gradient` the penalty is descended with the loss, as in the paper; under sgd that
    diverges if lr lambda F exceeds 2 for some weight. With `step: implicit` its proximal map
    follows the step,
        w <- (w + r lambda sum F a) / (1 + r lambda sum F),   r = lr / (1 - momentum),
    which is stable for every lambda and has the same fixed points, since momentum makes the loss
    count 1 / (1 - momentum) times. Adam divides steps by a scale per weight that the map does not
    know, so that adam and adamw descend by the gradient; their steps are bounded.

    Client state, by parameter name and of the parameter's shape:
        fisher: float. sum_j F^j.
        pull: float. sum_j F^j a.

    Differs from the paper: `anchor: latest` and `step: implicit` are the defaults. The paper has
    one learner; that each client estimates the Fisher information on its own data is the usual
    combination with FedAvg.

    Reference: Kirkpatrick, Pascanu, Rabinowitz, Veness, Desjardins, Rusu, Milan, Quan, Ramalho,
    Grabska-Barwinska, Hassabis, Clopath, Kumaran, Hadsell: Overcoming catastrophic forgetting in
    neural networks, PNAS 2017. Huszar: Note on the quadratic penalties in elastic weight
    consolidation, PNAS 2018.
    """

    lambda_: Annotated[NonNegativeFloat, Field(alias="lambda"), Search(0.1, 1e4, log=True)] = 10.0
    """Weight of the penalty (the paper's lambda)."""
    anchor: Literal["latest", "each"] = "latest"
    """Models towards which the penalty pulls: of the end of the client's latest task for all Fisher
    information (latest), or of the end of each task for that task's (each: the paper)."""
    step: Literal["implicit", "gradient"] | None = None
    """How a local step descends the penalty: by its proximal map (implicit, with sgd only), or with
    the loss (gradient). If None, implicit with sgd and gradient with adam and adamw."""
    fisher: Literal["model", "empirical"] = "model"
    """Labels for the Fisher information: drawn from the model (model), or the data's
    (empirical)."""
    samples: Annotated[PositiveInt | None, Fixed()] = 256
    """Examples per client on which the Fisher information is estimated. If None, all."""

    title: ClassVar[str] = "EWC"
    family: ClassVar[str] = "Regularization and distillation"
    idea: ClassVar[str] = "Clients hold back the weights that their earlier tasks need."
    paper: ClassVar[str] = "Kirkpatrick et al., PNAS 2017"
    ClientState: ClassVar[type] = FisherSums
    needs: ClassVar[Needs] = Needs(prefers=Preferences(head={"split": "growing"}), layers="trained")

    def check_config(self, config: Any) -> str | None:
        """Refuse batch norm without running statistics, and `step: implicit` with Adam.

        Gradients are computed per example, and the proximal map needs to know the step's size.
        """
        uses_batch_norm = getattr(config.model, "norm", "none") in (None, "batch")
        if uses_batch_norm and not config.model.running_stats:
            return "model.running_stats: must be true with ewc and batch norm, got False"
        optimizer = config.train.optimizer
        if self.step == "implicit" and not optimizer.sums_gradients:
            kind = optimizer.kind
            return f"method.step: must be 'gradient' or omitted with {kind}, got 'implicit'"
        return None

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        """Name lambda and the step, of which the gradient diverges if lr * lambda * F exceeds 2."""
        other = ", or step: implicit" if self.step == "gradient" else ""
        step = "" if self.step is None else f" with step: {self.step}"
        hint = f"lambda {self.lambda_:g} of ewc{step} (try {self.lambda_ / 10:g}{other})"
        return Diagnosis(divergence=hint)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train with the penalty, then add the task's Fisher information; nothing is sent.

        Raises:
            UserError: A custom module has batch norm without running statistics.

        """
        if not context.network.body.has_running_statistics:
            raise UserError(
                "model: must be a module whose batch norms have running statistics with ewc, "
                "got track_running_stats=False"
            )
        train = Train(prepare=self.penalize) if context.task else Train()
        return [train, Exchange("information", client_work=self.add_information)]

    def penalize(self, client: Client[FisherSums]) -> Prepared:
        """Return the penalty, which is zero for a client without a finished task."""
        sums, strength = client.state, self.lambda_
        implicit = client.sums_gradients if self.step is None else self.step == "implicit"
        if implicit:
            strength /= 1 - client.momentum
        return Prepared(transforms=(Proximal(sums.pull, strength, sums.fisher, implicit),))

    def add_information(self, client: Client[FisherSums]) -> ClientResult[FisherSums]:
        """Return the sums with those of task k."""
        sums, new = client.state, self.fisher_information(client)
        fisher = add_by_name(sums.fisher, new)
        if self.anchor == "latest":
            pull = {name: value * client.params[name] for name, value in fisher.items()}
        else:
            latest = {name: value * client.params[name] for name, value in new.items()}
            pull = add_by_name(sums.pull, latest)
        return ClientResult(state=FisherSums(fisher, pull))

    def fisher_information(self, client: Client[FisherSums]) -> Tensors:
        """Return F: the mean over examples of the squared gradient of log p(y | x)."""
        params = {name: client.params[name] for name in client.context.trainable}
        squares = {name: torch.zeros_like(value) for name, value in params.items()}
        rows, generator = self.sample_rows(client), client.draw("fisher labels")
        for batch in map(client.data.batch, torch.split(rows, _BATCH_ROWS)):
            y = batch.y if self.fisher == "empirical" else sample_targets(client, batch, generator)
            for name, value in sum_squared_gradients(client, params, batch, y).items():
                squares[name] += value
        return {name: value / len(rows) for name, value in squares.items()}

    def sample_rows(self, client: Client[FisherSums]) -> Tensor:
        """Return the rows of the examples on which F is estimated."""
        index = client.data.index
        order = torch.randperm(len(index), generator=client.draw("fisher rows"))
        return index[order[: self.samples].to(index.device)]


def sum_squared_gradients(client: Client, params: Tensors, batch: Batch, y: Tensor) -> Tensors:
    """Return the sum over a batch of each example's squared gradient of log p(y | x).

    Args:
        client: The client.
        params: Parameters with respect to which gradients are taken.
        batch: Examples.
        y: int64 [rows]. Label of each example; or float [rows], its number.

    """
    real = torch.ones(1, device=batch.x.device)

    def negative_log_likelihood(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
        fwd = ForwardPass(buffers=client.buffers, under_vmap=True)
        logits = client.context.network.logits({**client.params, **params}, x.unsqueeze(0), fwd)
        row = Batch(x.unsqueeze(0), y.unsqueeze(0), real, batch.active_outputs)
        return target_losses(logits, row).sum()

    per_example = vmap(grad(negative_log_likelihood), in_dims=(None, 0, 0))
    grads = per_example(params, batch.x, y)
    return {name: value.square().sum(0) for name, value in grads.items()}


def sample_targets(client: Client, batch: Batch, generator: torch.Generator) -> Tensor:
    """Return one target per example, drawn from the model: p(y | x) is exp(-loss), normalized.

    It is a label; or a number, which has the model's output as its mean and the variance 1/2.
    """
    with torch.no_grad():
        logits = mask_inactive(client.logits(batch), batch)
    if batch.y.is_floating_point():
        noise = torch.randn(len(logits), generator=generator) / math.sqrt(2)
        return logits[:, 0] + noise.to(logits.device)
    labels = torch.multinomial(logits.softmax(1).cpu(), 1, generator=generator)
    return labels.squeeze(1).to(logits.device)


def add_by_name(a: Tensors, b: Tensors) -> Tensors:
    """Return a + b over the names of both; a missing name counts as zero."""
    return a | {name: a[name] + value if name in a else value for name, value in b.items()}
