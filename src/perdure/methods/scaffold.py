"""SCAFFOLD: control variates correct the drift of clients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Prepared, Train, stacked
from perdure.contract.method import Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.transforms import AddToGradient
from perdure.contract.uploads import Change, ClientResult, CollectedUploads, LocalUpdate, Sum
from perdure.core.trees import Tensors, Tree, per_client


@dataclass(frozen=True)
class ControlVariate:
    """Server or client state: a control variate and its task."""

    control: Tensors = field(default_factory=dict)
    """c (on a client c_i) by parameter name."""
    task: int = -1
    """The task to which it belongs; -1 for none."""


@dataclass(frozen=True)
class Scaffold(Method):
    """Control variates correct the drift of clients with different data.

    The server has a control variate c, client i has c_i; S are the clients of a round, N all
    clients, K the steps of a client, eta_g = `train.server_lr`:
        client  y <- y - eta_l (g - c_i + c), K times, from y = x
                c_i+ = c_i - c + (x - y) / (K eta_l)
        server  x <- x + eta_g mean_S (y - x)
                c <- c + (1 / N) sum_S (c_i+ - c_i)
    The server sends c in every round; clients send c_i+ - c_i with their update, so uploads and
    broadcasts are twice those of FedAvg.

    Server state and client state, by parameter name and of the parameter's shape:
        control: float. c (on a client c_i).
        task: int. The task to which the control variate belongs.

    Differs from the paper: control variates are zero at the start of each task, since those of the
    previous task are gradients of another loss.

    Reference: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled
    Averaging for Federated Learning, ICML 2020 (Algorithm 1, option II).
    """

    title: ClassVar[str] = "SCAFFOLD"
    family: ClassVar[str] = "Baselines"
    idea: ClassVar[str] = "Control variates correct the drift of clients whose data differ."
    paper: ClassVar[str] = "Karimireddy et al., ICML 2020"
    ServerState: ClassVar[type] = ControlVariate
    ClientState: ClassVar[type] = ControlVariate
    needs: ClassVar[Needs] = Needs(
        prefers=Preferences(
            head={"split": "growing"},
            weighting="uniform",
            demanded={"weighting": "its control variates are plain means over the clients"},
        ),
        cumulative=True,
    )

    def check_config(self, config: Any) -> str | None:
        """Refuse all but plain SGD, for which (x - y) / (K eta_l) is the mean of the gradients."""
        train = config.train
        if not train.optimizer.sums_gradients:
            return f"train.optimizer: must be sgd with scaffold, got {train.optimizer.kind!r}"
        if train.momentum:
            return f"train.momentum: must be 0 with scaffold, got {train.momentum}"
        if train.clip is not None:
            return f"train.clip: must be null with scaffold, got {train.clip}"
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Reset c, then train with corrected steps."""
        return [
            Exchange("reset", "none", aggregate=self.reset),
            Train(
                broadcast=self.send_control,
                prepare=self.correct_gradient,
                make_upload=self.upload,
                adjust=self.adjust,
            ),
        ]

    def reset(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        """Set c = 0 at the start of a task."""
        zero = {name: torch.zeros_like(server.params[name]) for name in context.trainable}
        return replace(server, state=ControlVariate(zero, context.task))

    def send_control(self, server: Server, context: Context) -> Tree:
        """Send c."""
        return {"control": server.state.control}

    def correct_gradient(self, client: Client) -> Prepared:
        """Return the correction of every step: g - c_i + c."""
        own_control = client_control(client)
        control = client.broadcast["control"]
        difference = {name: c - own_control[name] for name, c in control.items()}
        return Prepared(transforms=(AddToGradient(difference),))

    @stacked
    def upload(self, clients: list[Client], local: LocalUpdate) -> ClientResult:
        """Send c_i+ - c_i = -c + (x - y) / (K eta_l), and store c_i+ on the client."""
        scale = torch.tensor([1 / client.lr_sum for client in clients])
        control = clients[0].broadcast["control"]
        change = {
            name: -c - local.update[name] * per_client(scale, local.update[name])
            for name, c in control.items()
            if name in local.update
        }
        states = [next_control(client, change, row) for row, client in enumerate(clients)]
        return ClientResult({"control": Sum(change, weight=1.0)}, states)

    def adjust(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Add the sum over S of c_i+ - c_i, divided by N, to c."""
        total = uploads.total("control")
        control = server.state.control | {
            name: server.state.control[name] + value / context.clients_total
            for name, value in total.items()
        }
        return replace(change, state=ControlVariate(control, context.task))


def client_control(client: Client) -> Tensors:
    """Return c_i, which is zero in a new task, so that c stays the mean of all c_i."""
    stored = client.state.control if client.state.task == client.context.task else {}
    control = client.broadcast["control"]
    return {
        name: stored[name] if name in stored else torch.zeros_like(c) for name, c in control.items()
    }


def next_control(client: Client, change: Tensors, row: int) -> ControlVariate:
    """Return c_i+ of the client in one row of a stack."""
    control = client_control(client)
    new = {name: value + change[name][row] for name, value in control.items() if name in change}
    return ControlVariate(control | new, client.context.task)
