"""EWC: elastic weight consolidation on every client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, vmap

from perdure.config.types import NonNegativeFloat, PositiveInt
from perdure.contract.context import Client, Context
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.contract.step import Batch, mask_inactive
from perdure.contract.transforms import Proximal
from perdure.contract.uploads import ClientResult
from perdure.core.trees import Tensors
from perdure.models.forward_pass import ForwardPass
from perdure.models.ops import cross_entropy

_BATCH_ROWS = 64
"""Examples whose gradients are computed together."""


@dataclass(frozen=True)
class FisherSums:
    """Client state: sums over earlier tasks, by parameter name and of the parameter's shape."""

    fisher: Tensors = field(default_factory=dict)
    """sum_j F^j: Fisher information."""
    pull: Tensors = field(default_factory=dict)
    """sum_j F^j theta^j: Fisher information times the task's final parameters."""


@dataclass(frozen=True)
class Ewc(Method):
    """Elastic weight consolidation: clients restrain the weights that their earlier tasks need.

    In task k client m adds to its loss the penalty
        (lambda / 2) sum_{j < k} sum_i F^j_{m,i} (theta_i - theta^j_i)^2,
    where F^j_m is the diagonal of the Fisher information on the client's examples of task j, at the
    global model theta^j of that task's end. The client stores only the sums over tasks of F^j and
    F^j theta^j, from which the gradient of the whole penalty follows: lambda (theta * sum_j F^j -
    sum_j F^j theta^j). Uploads are those of FedAvg.

    With `step: gradient` the penalty is descended with the loss, as in the paper, which diverges if
    lr * lambda * F exceeds 2 for some weight. With `step: implicit` its proximal map follows the
    step, w <- (w + lr lambda sum F theta) / (1 + lr lambda sum F), which is stable for every lambda
    and equal to first order.

    Client state, by parameter name and of the parameter's shape:
        fisher: float. sum_j F^j.
        pull: float. sum_j F^j theta^j.

    Differs from the paper: `step: implicit` is the default. The paper has one learner; that each
    client estimates the Fisher information on its own data is the usual combination with FedAvg.

    Reference: Kirkpatrick, Pascanu, Rabinowitz, Veness, Desjardins, Rusu, Milan, Quan, Ramalho,
    Grabska-Barwinska, Hassabis, Clopath, Kumaran, Hadsell: Overcoming catastrophic forgetting in
    neural networks, PNAS 2017.
    """

    lambda_: Annotated[NonNegativeFloat, Field(alias="lambda")] = 100.0
    """Weight of the penalty (the paper's lambda)."""
    step: Literal["implicit", "gradient"] = "implicit"
    """How a local step descends the penalty: by its proximal map (implicit), or with the loss
    (gradient)."""
    fisher: Literal["model", "empirical"] = "model"
    """Labels for the Fisher information: drawn from the model (model), or the data's
    (empirical)."""
    samples: PositiveInt | None = 256
    """Examples per client on which the Fisher information is estimated. If None, all."""

    paper: ClassVar[str] = "Kirkpatrick et al., PNAS 2017"
    ClientState: ClassVar[type] = FisherSums

    @property
    def needs(self) -> Needs:
        """Require trained layers, whose weights are restrained."""
        return Needs(trained_layers=True)

    def check_config(self, config: Any) -> str | None:
        """Refuse batch norm without running statistics: gradients are computed per example."""
        uses_batch_norm = getattr(config.model, "norm", "none") in (None, "batch")
        if uses_batch_norm and not config.model.running_stats:
            return "model.running_stats: must be true with ewc and batch norm, got False"
        return None

    def divergence_hint(self, context: Context) -> str:
        """Name lambda and the step, of which the gradient diverges if lr * lambda * F exceeds 2."""
        other = ", or step: implicit" if self.step == "gradient" else ""
        advice = f"(try {self.lambda_ / 10:g}{other})"
        return f"lambda {self.lambda_:g} of ewc with step: {self.step} {advice}"

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train with the penalty, then add the task's Fisher information; nothing is sent."""
        train = Train(prepare=self.penalize) if context.task else Train()
        return [train, Exchange("information", client_work=self.add_information)]

    def penalize(self, client: Client[FisherSums]) -> Prepared:
        """Return the penalty, which is zero for a client without a finished task."""
        sums, implicit = client.state, self.step == "implicit"
        return Prepared(transforms=(Proximal(sums.pull, self.lambda_, sums.fisher, implicit),))

    def add_information(self, client: Client[FisherSums]) -> ClientResult[FisherSums]:
        """Return the sums, with F^k and F^k theta^k added."""
        sums, fisher = client.state, self.fisher_information(client)
        pull = {name: value * client.params[name] for name, value in fisher.items()}
        state = FisherSums(add_by_name(sums.fisher, fisher), add_by_name(sums.pull, pull))
        return ClientResult(state=state)

    def fisher_information(self, client: Client[FisherSums]) -> Tensors:
        """Return F: the mean over examples of the squared gradient of log p(y | x)."""
        params = {name: client.params[name] for name in client.context.trainable}
        squares = {name: torch.zeros_like(value) for name, value in params.items()}
        rows, generator = self.sample_rows(client), client.draw("fisher labels")
        for batch in map(client.data.batch, torch.split(rows, _BATCH_ROWS)):
            y = batch.y if self.fisher == "empirical" else sample_labels(client, batch, generator)
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
        y: int64 [rows]. Label of each example.
    """

    def negative_log_likelihood(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
        fwd = ForwardPass(buffers=client.buffers, under_vmap=True)
        logits = client.context.network.logits({**client.params, **params}, x.unsqueeze(0), fwd)
        return cross_entropy(mask_inactive(logits, batch), y.unsqueeze(0)).sum()

    per_example = vmap(grad(negative_log_likelihood), in_dims=(None, 0, 0))
    grads = per_example(params, batch.x, y)
    return {name: value.square().sum(0) for name, value in grads.items()}


def sample_labels(client: Client, batch: Batch, generator: torch.Generator) -> Tensor:
    """Return one label per example, drawn from the model's probabilities."""
    with torch.no_grad():
        logits = mask_inactive(client.logits(batch), batch)
    labels = torch.multinomial(logits.softmax(1).cpu(), 1, generator=generator)
    return labels.squeeze(1).to(logits.device)


def add_by_name(a: Tensors, b: Tensors) -> Tensors:
    """Return a + b over the names of both; a missing name counts as zero."""
    return a | {name: a[name] + value if name in a else value for name, value in b.items()}
