"""A method with buffered rounds, in which clients have a state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.contract import ClientResult, Method, Train


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
