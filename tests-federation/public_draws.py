"""Methods with repeatable draws on nodes, to compare them with a simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from perdure.contract import Exchange
from perdure.methods.fedprotip import FedProTIP
from perdure.methods.fot import FOT


def public(exchanges):
    """Return exchanges whose clients take their secret draws from the run's seed."""
    return [
        replace(each, client_work=partial(publicly, each.client_work))
        if isinstance(each, Exchange) and each.client_work is not None
        else each
        for each in exchanges
    ]


def publicly(work, client):
    return work(replace(client, secret_source=None))


@dataclass(frozen=True)
class PublicFOT(FOT):
    """FOT."""

    def exchanges(self, context):
        return public(super().exchanges(context))


@dataclass(frozen=True)
class PublicFedProTIP(FedProTIP):
    """FedProTIP."""

    def exchanges(self, context):
        return public(super().exchanges(context))
