"""Methods that keep something between two rounds: late uploads, a pull that changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.contract import ClientResult, Method, Prepared, Proximal, Train


@dataclass(frozen=True)
class Turns:
    """A client's state: how often it has trained."""

    count: int = 0


@dataclass(frozen=True)
class Late(Method):
    """Closes a round after two uploads; an upload that is one round late counts half."""

    ClientState: ClassVar[type] = Turns

    def exchanges(self, context):
        return [Train(buffer_size=2, staleness_weight=self.discount, make_upload=self.count)]

    def discount(self, staleness):
        return 0.5**staleness

    def count(self, client, local):
        return ClientResult(state=Turns(client.state.count + 1))


@dataclass(frozen=True)
class Rising(Method):
    """A pull towards the global model that grows from round to round."""

    def exchanges(self, context):
        return [Train(prepare=self.hold_near)]

    def hold_near(self, client):
        strength = 0.137 * (1 + client.context.round + 5 * client.context.task) ** 1.3
        return Prepared(transforms=(Proximal(client.params, strength, implicit=True),))
