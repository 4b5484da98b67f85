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

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad, vmap

from perdure.methods.base import Batch, Client, Finish, Method, Net, Place
from perdure.models.ops import cross_entropy
from perdure.models.passes import Pass
from perdure.trees import Tensors, Tree

_ROWS = 64


@dataclass(frozen=True)
class Ewc(Method):
    """A quadratic penalty, weighted by the Fisher information.

    lambda: weight of the penalty (the paper's lambda).
    step: how a local step descends the penalty. gradient: with the loss, as in the paper, which
        runs away once lr * lambda * F exceeds 2 for some weight; implicit (ours): by the penalty's
        proximal map after the step, w <- (w + lr lambda sum F theta) / (1 + lr lambda sum F),
        stable for every lambda and the same to first order.
    fisher: labels drawn from the model (the Fisher information), or the data's (empirical).
    samples: examples of a client on which it is estimated; null: all.
    """

    lambda_: Annotated[float, Field(alias="lambda", ge=0)] = 100.0
    step: Literal["implicit", "gradient"] = "implicit"
    fisher: Literal["model", "empirical"] = "model"
    samples: Annotated[int, Field(ge=1)] | None = 256

    paper: ClassVar[str] = "Kirkpatrick et al., PNAS 2017"
    beside_prompts: ClassVar[bool] = False

    def refuse(self, config: Any) -> str | None:
        """Statistics of a batch: examples pass one by one, and one alone has no spread."""
        reason, model = super().refuse(config), config.model
        if reason is None and not model.running_stats and model.norm in (None, "batch"):
            reason = "model.running_stats: got False, allowed with ewc: true, or another model.norm"
        return reason

    def prepare(self, client: Client) -> Tensors:
        """The kept sums; zeros for a client that has seen no task to its end."""
        if client.place.task == 0:
            return {}
        kept, own = client.kept, {}
        for name in self.trainable(client.params, client.place):
            zero = torch.zeros_like(client.params[name])
            own[f"fisher.{name}"] = kept.get("fisher", {}).get(name, zero)
            own[f"pull.{name}"] = kept.get("pull", {}).get(name, zero)
        return own

    def gradient(self, grads: Tensors, params: Tensors, received: Tree, own: Tensors) -> Tensors:
        """The gradient of the penalty, added."""
        if self.step != "gradient":
            return grads
        return {
            name: g + self.lambda_ * (own[f"fisher.{name}"] * params[name] - own[f"pull.{name}"])
            if f"fisher.{name}" in own
            else g
            for name, g in grads.items()
        }

    def settles(self, optimizer: str) -> bool:
        """Only for the implicit step."""
        return self.step == "implicit"

    def settle(
        self, params: Tensors, before: Tensors, received: Tree, own: Tensors, lr: float
    ) -> Tensors:
        """The proximal map of the penalty; as it is where there is none yet."""
        if self.step != "implicit" or not own:
            return params
        weight = lr * self.lambda_
        return {
            name: (value + weight * own[f"pull.{name}"]) / (1 + weight * own[f"fisher.{name}"])
            for name, value in params.items()
        }

    def consolidates(self, place: Place) -> bool:
        """After every task but the last."""
        return place.task < place.tasks - 1

    def consolidates_alone(self) -> bool:
        """Nothing travels for it."""
        return True

    def extract(self, client: Client) -> Finish:
        """Add this task's Fisher information to the sums; nothing is sent."""
        fisher, kept = self.information(client), client.kept
        sums, pulls = dict(kept.get("fisher", {})), dict(kept.get("pull", {}))
        for name, value in fisher.items():
            sums[name] = sums[name] + value if name in sums else value
            pull = value * client.params[name]
            pulls[name] = pulls[name] + pull if name in pulls else pull
        return Finish({}, {"fisher": sums, "pull": pulls})

    def information(self, client: Client) -> Tensors:
        """The mean over examples of the squared gradient of log p(y | x), weight by weight."""
        names = self.trainable(client.params, client.place)
        params = {name: client.params[name] for name in names}
        total = {name: torch.zeros_like(value) for name, value in params.items()}
        rows, labels = self._rows(client), client.draw("fisher labels")
        for batch in map(client.shard.batch, torch.split(rows, _ROWS)):
            for name, value in self._squares(client, params, batch, labels).items():
                total[name] += value
        return {name: value / len(rows) for name, value in total.items()}

    def _rows(self, client: Client) -> Tensor:
        index = client.shard.index
        order = torch.randperm(len(index), generator=client.draw("fisher rows"))
        return index[order[: self.samples].to(index.device)]

    def _squares(
        self, client: Client, params: Tensors, batch: Batch, labels: torch.Generator
    ) -> Tensors:
        """The sum over a batch of each example's squared gradient."""

        def surprise(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
            net = Net(client.place.network, Pass(buffers=client.buffers, mapped=True))
            logits = net.logits({**client.params, **params}, x.unsqueeze(0))
            return cross_entropy(competing(logits, batch), y.unsqueeze(0)).sum()

        y = batch.y if self.fisher == "empirical" else drawn(client, batch, labels)
        each = vmap(grad(surprise), in_dims=(None, 0, 0))(params, batch.x, y)
        return {name: value.square().sum(0) for name, value in each.items()}


def drawn(client: Client, batch: Batch, generator: torch.Generator) -> Tensor:
    """One label for each example, as the model would give it."""
    with torch.no_grad():
        logits = competing(client.net().logits(client.params, batch.x), batch)
    labels = torch.multinomial(logits.softmax(1).cpu(), 1, generator=generator)
    return labels.squeeze(1).to(logits.device)


def competing(logits: Tensor, batch: Batch) -> Tensor:
    """The logits, out of reach where an output does not compete in the loss."""
    return logits if batch.allowed is None else logits.masked_fill(~batch.allowed, -1e9)
