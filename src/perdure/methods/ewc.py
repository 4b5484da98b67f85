"""EWC + FL: clients hold back the weights that their earlier tasks need.

Kirkpatrick, Pascanu, Rabinowitz, Veness, Desjardins, Rusu, Milan, Quan, Ramalho,
Grabska-Barwinska, Hassabis, Clopath, Kumaran, Hadsell: Overcoming catastrophic forgetting in neural
networks, PNAS 2017. Client m adds to its loss in task k
    (lambda / 2) sum_{j < k} sum_i F^j_{m,i} (theta_i - theta^j_i)^2,
F^j_m the diagonal of the Fisher information on its own data of task j at the global model theta^j
of that task's end. Only the sums over tasks of F^j and of F^j theta^j are kept, which give the
gradient of the whole sum: lambda (theta * sum_j F^j - sum_j F^j theta^j). Nothing besides the
update is sent.

That the Fisher information is each client's own is the common way to put EWC into FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, vmap

from perdure.config.types import NonNegativeFloat, PositiveInt
from perdure.contract import (
    Batch,
    Client,
    ClientResult,
    Context,
    Exchange,
    Method,
    Needs,
    Prepared,
    Proximal,
    Train,
)
from perdure.contract.step import mask_inactive
from perdure.core.trees import Tensors
from perdure.models.forward_pass import ForwardPass
from perdure.models.ops import cross_entropy

_ROWS = 64
"""Examples whose gradients are computed together."""


@dataclass(frozen=True)
class FisherSums:
    """What a client keeps of its earlier tasks, by parameter name and of the parameter's shape."""

    fisher: Tensors = field(default_factory=dict)
    """sum_j F^j"""
    pull: Tensors = field(default_factory=dict)
    """sum_j F^j theta^j"""


@dataclass(frozen=True)
class Ewc(Method):
    """A quadratic penalty, weighted by the Fisher information.

    With `step: gradient` the penalty descends with the loss, as in the paper, which diverges once
    lr * lambda * F exceeds 2 for some weight. With `step: implicit` (not in the paper) its proximal
    map follows the step, w <- (w + lr lambda sum F theta) / (1 + lr lambda sum F), which is stable
    for every lambda and the same to first order.
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
        """Need layers that are trained: their weights are held back."""
        return Needs(trained_layers=True)

    def check_config(self, config: Any) -> str | None:
        """Refuse statistics of a batch: examples pass one by one, and one alone has no spread."""
        of_batch = getattr(config.model, "norm", "none") in (None, "batch")
        if of_batch and not config.model.running_stats:
            return "model.running_stats: must be true, or another model.norm with ewc, got False"
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train with the penalty, then add this task's information; nothing is sent for it."""
        train = Train(prepare=self.hold) if context.task else Train()
        return [train, Exchange("information", client_work=self.add_information)]

    def hold(self, client: Client[FisherSums]) -> Prepared:
        """Return the penalty; it is zero for a client that has finished no task yet."""
        kept, implicit = client.state, self.step == "implicit"
        return Prepared(transforms=(Proximal(kept.pull, self.lambda_, kept.fisher, implicit),))

    def add_information(self, client: Client[FisherSums]) -> ClientResult[FisherSums]:
        """Add F^k and F^k theta^k to the sums."""
        kept, fisher = client.state, self.information(client)
        pull = {name: value * client.params[name] for name, value in fisher.items()}
        return ClientResult(state=FisherSums(total(kept.fisher, fisher), total(kept.pull, pull)))

    def information(self, client: Client[FisherSums]) -> Tensors:
        """Return F: the mean over examples of the squared gradient of log p(y | x)."""
        params = {name: client.params[name] for name in client.context.trainable}
        squares = {name: torch.zeros_like(value) for name, value in params.items()}
        rows, labels = self.rows(client), client.draw("fisher labels")
        for batch in map(client.data.batch, torch.split(rows, _ROWS)):
            y = batch.y if self.fisher == "empirical" else sample_labels(client, batch, labels)
            for name, value in sum_squared_gradients(client, params, batch, y).items():
                squares[name] += value
        return {name: value / len(rows) for name, value in squares.items()}

    def rows(self, client: Client[FisherSums]) -> Tensor:
        """Return the rows of the examples on which F is estimated."""
        index = client.data.index
        order = torch.randperm(len(index), generator=client.draw("fisher rows"))
        return index[order[: self.samples].to(index.device)]


def sum_squared_gradients(client: Client, params: Tensors, batch: Batch, y: Tensor) -> Tensors:
    """Return the sum over a batch of each example's squared gradient of log p(y | x)."""

    def surprise(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
        everything, fwd = (
            {**client.params, **params},
            ForwardPass(buffers=client.buffers, under_vmap=True),
        )
        logits = client.context.network.logits(everything, x.unsqueeze(0), fwd)
        return cross_entropy(mask_inactive(logits, batch), y.unsqueeze(0)).sum()

    each = vmap(grad(surprise), in_dims=(None, 0, 0))(params, batch.x, y)
    return {name: value.square().sum(0) for name, value in each.items()}


def sample_labels(client: Client, batch: Batch, generator: torch.Generator) -> Tensor:
    """Return one label per example, drawn from the model's probabilities."""
    with torch.no_grad():
        logits = mask_inactive(client.logits(batch), batch)
    labels = torch.multinomial(logits.softmax(1).cpu(), 1, generator=generator)
    return labels.squeeze(1).to(logits.device)


def total(a: Tensors, b: Tensors) -> Tensors:
    """Return a + b over the names of both; a name that one of them lacks counts as zero there."""
    return a | {name: a[name] + value if name in a else value for name, value in b.items()}
